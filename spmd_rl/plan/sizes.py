"""Write a size in the unit that suits it."""


def in_bytes(size: float) -> str:
    """A size in the unit that suits it."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size:.0f} B" if size else "0"
