from spmd_rl.weights.transfer.boxes import (
    Box,
    Piece,
    Shard,
    common_boxes,
    cut,
    cut_columns,
    cut_rows,
    intersect,
    refine,
    split,
    stack,
)


def test_boxes_of_different_tensors_or_places_have_nothing_in_common():
    a = Box("a", (0, 0), (4, 4))
    assert intersect(a, Box("b", (0, 0), (4, 4))) is None
    assert intersect(a, Box("a", (4, 0), (4, 4))) is None
    assert intersect(a, Piece("a", (2, 1), (9, 2), "p", (0, 0))) == Box("a", (2, 1), (2, 2))


def test_cutting_rows_and_columns_keeps_each_element_where_it_was():
    shape, pieces = stack("p", [Box("a", (0, 0), (3, 4)), Box("b", (5, 0), (2, 4))])
    assert shape == (5, 4)
    assert cut_rows(pieces, 2, 4) == [Piece("a", (2, 0), (1, 4), "p", (0, 0)), Piece("b", (5, 0), (1, 4), "p", (1, 0))]
    assert cut_columns(pieces[1:], 1, 3) == [Piece("b", (5, 1), (2, 2), "p", (3, 0))]


def test_a_leading_dimension_of_the_parameter_selects_pieces():
    pieces = [Piece(f"expert{e}", (0, 0), (2, 3), "w13", (e, 0, 0)) for e in range(4)]
    assert cut(pieces, 0, 2, 4) == [Piece(f"expert{e}", (0, 0), (2, 3), "w13", (e - 2, 0, 0)) for e in (2, 3)]
    assert cut(pieces[:1], 1, 1, 2) == [Piece("expert0", (1, 0), (1, 3), "w13", (0, 0, 0))]


def test_a_box_inside_a_piece_is_as_far_from_the_pieces_corner_in_the_parameter_as_in_the_tensor():
    piece = Piece("a", (2, 3), (4, 5), "p", (7, 1, 1))
    assert piece.part(Box("a", (3, 5), (2, 2))) == Piece("a", (3, 5), (2, 2), "p", (7, 2, 3))


def test_splitting_a_box_keeps_every_element_once_and_the_limit():
    box = Box("a", (2, 3), (5, 7))
    for limit in (1, 3, 7, 8, 20, 35):
        parts = split(box, limit)
        cells = [(r, c) for part in parts for r in _span(part, 0) for c in _span(part, 1)]
        assert all(part.elements <= limit for part in parts)
        assert cells == [(r, c) for r in range(2, 7) for c in range(3, 10)] or sorted(cells) == sorted(set(cells))
        assert len(cells) == box.elements


def test_refined_boxes_are_disjoint_and_lie_in_each_box_wholly_or_not_at_all():
    boxes = [Box("a", (0, 0), (4, 6)), Box("a", (2, 0), (4, 6)), Box("a", (0, 3), (2, 3))]
    cells = refine(boxes)
    assert sum(cell.elements for cell in cells) == 36
    assert all(intersect(box, cell) in (None, cell) for box in boxes for cell in cells)


def test_common_boxes_of_two_layouts_are_what_every_rank_can_checksum():
    rows = [Shard({"p": (3, 4)}, (Piece("a", (3 * n, 0), (3, 4), "p", (0, 0)),)) for n in range(2)]
    columns = [Shard({"p": (6, 2)}, (Piece("a", (0, 2 * n), (6, 2), "p", (0, 0)),)) for n in range(2)]
    assert len(common_boxes(rows + columns)) == 4


def _span(box, dim):
    return range(box.start[dim], box.start[dim] + box.shape[dim])
