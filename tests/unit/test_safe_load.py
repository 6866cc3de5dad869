"""Files of torch.save and of torch.distributed.checkpoint: data is loaded, code is not run."""

import fractions
import io
import pathlib
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from alto_distributed import ALTO, adopt
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


class Touch:
    """Pickled code: it leaves a file where it is told."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_index_that_holds_code_is_not_run(tmp_path):
    """torch would read it with plain pickle."""
    dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path)
    path, trace = tmp_path / ".metadata", tmp_path / "ran"
    index = pickle.loads(path.read_bytes())
    index.planner_data = Touch(trace)
    path.write_bytes(pickle.dumps(index))
    assert safe_load._problem(path).startswith(".metadata (")
    assert not trace.exists()
    pickle.loads(path.read_bytes())
    assert trace.exists()  # it is code


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


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("target", [Metadata, pathlib.PosixPath, torch.serialization._get_layout])
def test_an_index_that_changes_a_class(target, tmp_path):
    """An unpickler sets attributes of whatever a file names, also of a class that this process goes on using."""
    path = tmp_path / ".metadata"
    named = pickle.dumps(target, protocol=2)[:-1]
    state = pickle.dumps((None, {"poisoned": 1}), protocol=2)[2:-1]
    path.write_bytes(named + state + pickle.BUILD + pickle.STOP)
    try:
        assert safe_load._problem(path) == f".metadata (UnpicklingError: attributes for a {type(target).__name__})"
        assert not hasattr(target, "poisoned")
        pickle.loads(path.read_bytes())
        assert target.poisoned == 1  # it does
    finally:
        if hasattr(target, "poisoned"):
            del target.poisoned


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda index: setattr(index, "state_dict_metadata", [1]), "its state_dict_metadata is a list"),
        (lambda index: setattr(index, "storage_data", 3), "its storage_data is a int"),
        (lambda index: delattr(index, "storage_data"), "its storage_data is a NoneType"),
        (lambda index: index.__dict__.pop("state_dict_metadata"), "its state_dict_metadata is a NoneType"),  # fuzz.py
        (
            lambda index: index.state_dict_metadata.update({3: None}),
            "its state_dict_metadata is a dict, not a dictionary",
        ),
        (
            lambda index: index.storage_data.update(x=None),
            "its storage_data is a dict, not a dictionary by MetadataInd",
        ),
        (
            lambda index: index.storage_data.update({dcp.metadata.MetadataIndex("x"): None}),
            "the name of a file that is not a string",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_index_of_another_form(change, said, tmp_path):
    dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path)
    path = tmp_path / ".metadata"
    index = pickle.loads(path.read_bytes())
    change(index)
    path.write_bytes(pickle.dumps(index))
    assert said in safe_load._problem(path)


@pytest.fixture
def folder(tmp_path):
    """A folder that adopt reads, and what it is for."""
    model = nn.Linear(3, 2)
    old = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    old.step()
    dcp.save(get_optimizer_state_dict(model, old), checkpoint_id=tmp_path / "saved")
    adopt(ALTO(model.parameters()), tmp_path / "saved", model)
    return tmp_path / "saved", model


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adopt_runs_no_code_of_an_index(folder, tmp_path):
    folder, model = folder
    path, trace = folder / ".metadata", tmp_path / "ran"
    index = pickle.loads(path.read_bytes())
    index.planner_data = Touch(trace)
    path.write_bytes(pickle.dumps(index))
    optimizer = ALTO(model.parameters())
    with pytest.raises(
        ValueError, match=r"saved is not a checkpoint .* that adopt reads: .metadata \(Unpickling.*Path"
    ):
        adopt(optimizer, folder, model)
    assert not trace.exists()
    assert not optimizer.state
    adopt(optimizer, dcp.FileSystemReader(folder), model)  # the caller's own reader, which is trusted
    assert trace.exists()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adopt_runs_no_code_of_a_step_count(folder, tmp_path):
    """What is not a tensor is pickled into the checkpoint's files, and torch loads it with weights_only=False."""
    folder, model = folder
    path, trace = folder / ".metadata", tmp_path / "ran"
    index, code = pickle.loads(path.read_bytes()), io.BytesIO()
    torch.save(Touch(trace), code)
    (folder / "code").write_bytes(code.getvalue())
    name = "state.weight.step"
    index.state_dict_metadata[name] = dcp.metadata.BytesStorageMetadata()
    place = next(info for at, info in index.storage_data.items() if at.fqn == name)
    index.storage_data = {at: info for at, info in index.storage_data.items() if at.fqn != name}
    place.relative_path, place.offset, place.length = "code", 0, len(code.getvalue())
    index.storage_data[dcp.metadata.MetadataIndex(name)] = place
    path.write_bytes(pickle.dumps(index))
    with pytest.raises(
        ValueError, match="the checkpoint cannot be read: rank 0: UnpicklingError: Weights only load failed"
    ):
        adopt(ALTO(model.parameters()), folder, model)
    assert not trace.exists()
    torch.load(folder / "code", weights_only=False)
    assert trace.exists()  # it is code
