"""Files of torch.save: data is loaded, code is not run."""

import fractions
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from alto_distributed.pretrain.checkpoint import safe_load
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


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("place", ["../../elsewhere.distcp", "/etc/elsewhere", "a/../../b"])
def test_an_index_that_names_files_outside_of_its_checkpoint(place, tmp_path):
    """torch would open them."""
    dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path)
    path = tmp_path / ".metadata"
    assert safe_load._problem(path) is None
    index = pickle.loads(path.read_bytes())
    for info in index.storage_data.values():
        info.relative_path = place
    path.write_bytes(pickle.dumps(index))
    assert safe_load._problem(path) == f".metadata (it names {place}, which is not in the checkpoint)"
