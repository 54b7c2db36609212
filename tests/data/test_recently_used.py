"""What was used last is kept, within its bytes; what was dropped is made again."""

from spmd_rl.data.recently_used import RecentlyUsed


def test_what_was_used_last_is_kept_within_its_bytes():
    made: list[str] = []
    kept = RecentlyUsed[str, bytes](10, len)

    def of(key: str, size: int) -> int:
        return len(kept.of(key, lambda: made.append(key) or bytes(size)))

    assert [of("a", 4), of("b", 4), of("a", 4), of("c", 4)] == [4] * 4
    assert made == ["a", "b", "c"]
    assert of("a", 4) == 4 and made == ["a", "b", "c"], "b was dropped, which was used longest ago"
    assert of("b", 4) == 4 and made[3:] == ["b"]
    assert of("whole", 99) == 99 and of("whole", 99) == 99 and made[4:] == ["whole"], (
        "the newest is kept whatever it is"
    )
    assert of("a", 4) == 4 and of("b", 4) == 4 and of("a", 4) == 4 and made[5:] == ["a", "b"]
