"""The batch sizes that decode graphs are captured for."""

from zhilight.engine.graph_runner import padded_batch, padded_batches


def test_padding_holds_the_batch_and_wastes_little():
    for count in range(1, 513):
        size = padded_batch(count)
        assert size >= count
        assert size - count <= max(3, 7 if count <= 128 else 15 if count <= 256 else 31)
        assert padded_batch(size) == size  # a full graph serves itself


def test_the_sizes_serve_every_batch():
    sizes = padded_batches(300)
    assert {padded_batch(count) for count in range(1, 301)} == set(sizes)
    assert sizes[0] == 1 and sizes[-1] >= 300
