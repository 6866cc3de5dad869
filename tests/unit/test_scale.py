"""What a step costs at worlds that are not at hand, counted with torch's fake process group by scripts/scale.py."""

import collections

import pytest

from alto_distributed.sharding import LogicalParameter, Segment, layout, norms
from scripts import scale

MODEL = scale.MODELS["GPT-2 345M"]


@pytest.fixture
def constructed(monkeypatch):
    """How many segments and logical parameters were made: the work of building layouts."""
    counts = collections.Counter()
    for module in (scale, layout):
        for cls in (Segment, LogicalParameter):

            def counting(*arguments, cls=cls, **options):
                counts[cls.__name__] += 1
                return cls(*arguments, **options)

            if hasattr(module, cls.__name__):
                monkeypatch.setattr(module, cls.__name__, counting)
    return counts


def test_the_shapes_are_those_of_the_models():
    sizes = {name: sum(scale.numel(shape) for _, shape in shapes) for name, shapes in scale.MODELS.items()}
    assert sizes["GPT-2 345M"] == 354_871_296
    assert sizes["7B"] == 6_738_415_616  # Llama 2's
    assert sizes["175B"] == pytest.approx(175e9, rel=0.01)


@pytest.mark.parametrize("engine", ["ZeRO-2", "ZeRO-3"])
@pytest.mark.parametrize("ranks", scale.WORLDS)
def test_zero_sends_three_doubles_a_parameter_in_one_collective_a_group(engine, ranks):
    for rank in (0, ranks // 2, ranks - 1):
        result = scale.simulate(engine, MODEL, ranks, rank)
        assert result.collectives == 2
        assert result.sent == 3 * 8 * len(MODEL)
        assert result.states == pytest.approx(12 * 354_871_296 / ranks, rel=1e-3)


@pytest.mark.parametrize("ranks", scale.WORLDS)
def test_megatron_has_one_collective_for_data_and_one_for_tensor_parallelism(ranks):
    shapes = scale.MODELS["7B"]
    result = scale.simulate("Megatron", shapes, ranks, ranks - 1, tensor=8)
    cut = sum(len(shape) >= 2 for _, shape in shapes)
    over_data = len(shapes) if ranks > 8 else 0  # data parallelism of one rank needs none
    assert result.collectives == 1 + (ranks > 8)
    assert result.sent == 3 * 8 * (cut + over_data)
    assert result.parameters == len(shapes)


@pytest.mark.parametrize("engine", ["ZeRO-2", "ZeRO-3", "Megatron"])
def test_building_layouts_is_linear_in_parameters_whatever_the_world(engine, constructed):
    work = {}
    for ranks in (8, 1024):
        for layers in (24, 48):
            shapes = scale.gpt(layers, 1024, 50304, 1024)
            constructed.clear()
            scale.simulate(engine, shapes, ranks, ranks - 1)
            assert constructed["LogicalParameter"] == len(shapes)
            assert 0 < constructed["Segment"] <= len(shapes)
            work[ranks, layers] = constructed["Segment"]
    if engine == "Megatron":  # segments of what is held, alone
        assert work[1024, 24] < work[8, 24] < work[8, 48] <= 2 * work[8, 24]
    else:
        assert work[8, 24] == work[1024, 24] == 292
        assert work[8, 48] == work[1024, 48] == 292 + 24 * 12


def test_the_table_of_norms_grows_with_parameters_not_with_ranks(monkeypatch):
    made = []
    zeros = norms.NormTable.zeros
    monkeypatch.setattr(norms.NormTable, "zeros", lambda *given: made.append(zeros(*given)) or made[-1])
    for ranks in (8, 1024):
        scale.simulate("ZeRO-2", MODEL, ranks, 0)
    half = len(made) // 2
    assert [tuple(table.shape) for table in made[:half]] == [tuple(table.shape) for table in made[half:]]
    assert {tuple(table.shape) for table in made} == {(3, 98), (3, 194)}
