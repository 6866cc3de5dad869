"""Files of torch.save: data is loaded, code is not run."""

import fractions

import pytest
import torch

from alto_distributed.safe_load import more_than_data, only_data


def test_blocks_may_nest(tmp_path):
    """The inner one took out what the outer one had put in."""
    path = tmp_path / "file.pt"
    torch.save({"x": torch.ones(2), "half": fractions.Fraction(1, 2)}, path)
    assert "fractions.Fraction" in more_than_data(path)
    with only_data([fractions.Fraction]):
        with only_data([fractions.Fraction]):
            assert more_than_data(path) is None
        assert more_than_data(path) is None
        assert torch.load(path, weights_only=False)["half"] == fractions.Fraction(1, 2)
    with only_data([]), pytest.raises(Exception, match="Fraction"):
        torch.load(path, weights_only=False)  # as frameworks do
    assert torch.load(path, weights_only=False)["half"] == fractions.Fraction(1, 2)
