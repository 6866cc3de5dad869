"""DeepSpeed's checkpoints: saved, and loaded at the same world size, bit for bit; what lacks a state is refused.

What worlds 2 and 4 save here is also converted, for zero_universal.py to load at other world sizes.
"""

import fractions
import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from alto_distributed.deepspeed import universal
from alto_distributed.deepspeed.universal import convert
from tests.helpers import damage
from tests.helpers.cases import after, each, worlds
from tests.helpers.zero import PARAMS, trainable, weights
from tests.helpers.zero_checkpoints import (
    AFTER,
    BEFORE,
    CELLS,
    ESGD,
    FEW_CELLS,
    UNIVERSAL_CELLS,
    advance,
    assert_same,
    check_conversion,
    engine_for,
    groups_of_esgd,
    hyperparameters,
    on_rank_0,
    other_network,
    picture,
    place,
    states_of_esgd,
    three_groups,
    train_and_save,
)

ADAM = {"name": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
ELASTIC = ({"stage": 1, "elastic_checkpoint": True}, {})


def stock_converter(source, target):
    options = {"input_folder": str(source), "output_folder": str(target), "keep_temp_folder": False, "strict": True}
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    ds_to_universal.main(type("Options", (), {**options, **workers, "inject_missing_state": True}))


@worlds(2)
@each(CELLS)
def case_save(directory, label):
    train_and_save(directory, label)


@worlds(4)
@each(FEW_CELLS, exhaustive=UNIVERSAL_CELLS)
def case_save_on_four_ranks(directory, label):
    train_and_save(directory, label)


@worlds(2)
@each(CELLS)
@after("case_save")
def case_same_world_size_goes_on_bit_for_bit(directory, label, setting):
    folder = place(directory, label)
    at_save, at_end, saved_hyper = torch.load(folder / "pictures.pt")
    with engine_for(setting, lambda m: three_groups(m, lr=0.7, eps=1e-3), other_network()) as engine:
        engine.load_checkpoint(folder)
        assert_same("loaded", picture(engine), at_save)
        assert hyperparameters(engine) == saved_hyper, (hyperparameters(engine), saved_hyper)
        advance(engine, BEFORE, BEFORE + AFTER)
        assert_same("continued", picture(engine), at_end)


@worlds(2)
@each(cell=("stage 1", "BF16_Optimizer"))
@after("case_save")
def case_loading_again_into_an_engine_that_has_stepped(directory, cell):
    folder = place(directory, cell)
    at_save, at_end, _ = torch.load(folder / "pictures.pt")
    with engine_for(CELLS[cell]) as engine:
        advance(engine, 0, 2)
        engine.load_checkpoint(folder)
        assert_same("loaded", picture(engine), at_save)
        advance(engine, BEFORE, BEFORE + AFTER)
        assert_same("continued", picture(engine), at_end)


@worlds(2)
@each(UNIVERSAL_CELLS)
@after("case_save")
def case_conversion_carries_every_state(directory, label):
    check_conversion(place(directory, label))


@worlds(4)
@each(FEW_CELLS, exhaustive=UNIVERSAL_CELLS)
@after("case_save_on_four_ranks")
def case_conversion_on_four_ranks(directory, label):
    check_conversion(place(directory, label))


#: The cell that saved, and the one that loads.
CROSSED = {"from stage 1 to 2": ("stage 1", "stage 2")}
MORE_CROSSED = {
    "from stage 2 to 1": ("stage 2", "stage 1"),
    "from fp32 to bf16": ("stage 1", "stage 2, bf16"),
    "from fp32 to BF16_Optimizer": ("stage 2", "BF16_Optimizer"),
    "from BF16_Optimizer to fp32": ("BF16_Optimizer", "stage 1"),
    "from fp32 to bf16 at stage 3": ("stage 3", "stage 3, bf16"),
    "from bf16 to fp32 at stage 3": ("stage 3, bf16", "stage 3"),
}


@worlds(2)
@each(CROSSED, exhaustive=MORE_CROSSED)
@after("case_conversion_carries_every_state")
def case_universal_in_another_setting(directory, setting):
    """Master weights and states are bitwise those that were saved."""
    saved_by, loaded_by = setting
    at_save, _, _ = torch.load(place(directory, saved_by) / "pictures.pt")
    with engine_for(CELLS[loaded_by], model=other_network(), checkpoint={"load_universal": True}) as engine:
        engine.load_checkpoint(place(directory, saved_by), tag="universal")
        got = picture(engine)
        kept = [key for key in at_save if not key.endswith(" model")]
        assert_same("loaded", {key: got[key] for key in kept}, {key: at_save[key] for key in kept})
        advance(engine, BEFORE, BEFORE + 1)
        assert picture(engine)["steps"].tolist() == [BEFORE + 1]


@worlds(2)
@each(UNIVERSAL_CELLS)
@after("case_save")
def case_zero_to_fp32(directory, label):
    at_save, _, _ = torch.load(place(directory, label) / "pictures.pt")
    whole = get_fp32_state_dict_from_zero_checkpoint(str(place(directory, label)), tag="saved")
    for key, value in at_save.items():
        name, _, state = key.rpartition(" ")
        if state == "master":
            assert torch.equal(whole[name], value), name


@worlds(2)
@each(cell=("stage 0", "stage 1", "stage 2", "stage 3"))
@after("case_save")
def case_weights_alone_are_loaded(directory, cell):
    """Without states: they are as before, and training goes on from the weights."""
    at_save, _, _ = torch.load(place(directory, cell) / "pictures.pt")
    with engine_for(CELLS[cell], model=other_network()) as engine:
        advance(engine, 0, 1)
        before = picture(engine)
        engine.load_checkpoint(place(directory, cell), load_optimizer_states=False)
        got = picture(engine)
        for key in (key for key in got if key != "steps"):
            weight = key.endswith(("model", "master"))
            assert torch.equal(got[key], (at_save if weight else before)[key]), key
        assert got["steps"].tolist() == [1]
        advance(engine, 1, 2)
        assert picture(engine)["steps"].tolist() == [2]


@worlds(2)
@each(cell=("stage 0", "stage 1", "stage 2"))
@after("case_save")
def case_the_module_alone_is_loaded(directory, cell):
    """At stage 3 DeepSpeed loads nothing then, with any optimizer."""
    at_save, _, _ = torch.load(place(directory, cell) / "pictures.pt")
    with engine_for(CELLS[cell], model=other_network()) as engine:
        advance(engine, 0, 1)
        before = picture(engine)
        engine.load_checkpoint(place(directory, cell), load_module_only=True)
        got = picture(engine)
        for key in (key for key in got if key != "steps"):
            weight = key.endswith(("model", "master"))
            assert torch.equal(got[key], (at_save if weight else before)[key]), key


@worlds(2)
@each(cell=("stage 1", "stage 2", "stage 3", "BF16_Optimizer"))
@after("case_save")
def case_what_lacks_the_third_state_is_refused(directory, cell):
    """The stock converter drops grad_ema: loading what it wrote names the state, and says what to do."""
    folder = place(directory, cell)
    on_rank_0(stock_converter, folder / "saved", folder / "stock")
    with engine_for(UNIVERSAL_CELLS[cell], checkpoint={"load_universal": True}) as engine:
        before = weights(engine)
        # Without "states" too: DeepSpeed loads them below stage 3, which gave three states of zeros.
        for options in ({}, *([] if cell == "stage 3" else WEIGHTS_ALONE)):
            with pytest.raises(ValueError, match=r"no 'grad_ema' for parameter 'scale'.*deepspeed.universal INPUT"):
                engine.load_checkpoint(folder, tag="stock", **options)
            assert_same("unchanged", weights(engine), before)


WEIGHTS_ALONE = ({"load_optimizer_states": False}, {"load_module_only": True})


@worlds(2)
@each(cell=("stage 1", "stage 3"))
@after("case_conversion_carries_every_state")
def case_universal_weights_alone(directory, cell):
    """Stage 3 loads them alone. Below it DeepSpeed loads the states as well, which is told."""
    folder = place(directory, cell)
    at_save, _, saved_hyper = torch.load(folder / "pictures.pt")
    changed = {"groups": lambda m: three_groups(m, lr=0.7), "checkpoint": {"load_universal": True}}
    for options in WEIGHTS_ALONE:
        with engine_for(CELLS[cell], model=other_network(), **changed) as engine:
            advance(engine, 0, 1)
            before, own = picture(engine), hyperparameters(engine)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                engine.load_checkpoint(folder, tag="universal", **options)
            told, got = (
                [str(w.message) for w in caught if "load_module_only=True do not hold" in str(w.message)],
                picture(engine),
            )
            if cell == "stage 1":
                assert len(told) == 1, told
                assert_same("loaded", got, at_save)
                assert hyperparameters(engine) == saved_hyper
            else:
                assert told == []
                for key in (key for key in got if key != "steps"):
                    weight = key.endswith(("model", "master"))
                    assert torch.equal(got[key], (at_save if weight else before)[key]), key
                assert hyperparameters(engine) == own
            advance(engine, 3, 4)


def plain_groups(model):
    return [{"params": list(trainable(model).values())}]


LAMB = {"params": {**PARAMS, "alpha": 0}}


@worlds(2)
@each({"stage 1": 1}, exhaustive={"stage 2": 2, "stage 3": 3})
def case_eadamw_is_converted_and_adopts(directory, label, setting):
    """It is an ALTO; "type": "EAdamW" goes the same ways."""
    folder, cell, eadamw = place(directory, f"EAdamW, {label}"), ({"stage": setting}, {}), {"name": "EAdamW"}
    universal = {"checkpoint": {"load_universal": True}}
    for saved, options in (("saved", eadamw), ("adam", ADAM)):
        with engine_for(cell, plain_groups, **options) as engine:
            advance(engine, 0, BEFORE)
            engine.save_checkpoint(folder, tag=saved)
            if saved == "saved":
                at_save = picture(engine)
            else:
                moments = {n: safe_get_full_optimizer_state(p, "exp_avg") for n, p in trainable(engine.module).items()}
    on_rank_0(convert, folder / "saved", folder / "universal")
    on_rank_0(convert, folder / "adam", folder / "adopted", adopt=True)
    with engine_for(cell, plain_groups, other_network(), **eadamw, **universal) as engine:
        engine.load_checkpoint(folder, tag="universal")
        assert_same("loaded", picture(engine), at_save)
        assert {group["layerwise"] for group in engine.basic_optimizer.param_groups} == {"none"}
    with engine_for(cell, plain_groups, other_network(), **eadamw, **universal) as engine:
        engine.load_checkpoint(folder, tag="adopted")
        for name, p in trainable(engine.module).items():
            assert torch.equal(safe_get_full_optimizer_state(p, "exp_avg"), moments[name]), name
            assert not safe_get_full_optimizer_state(p, "grad_ema").any(), name


#: The cell, and the optimizer whose checkpoint is adopted.
ADOPTED = {
    "stage 1, adam": ("stage 1", ADAM),
    "stage 1, lamb": ("stage 1", LAMB),
    "stage 3, adam": ("stage 3", ADAM),
    "stage 3, lamb": ("stage 3", LAMB),
    "BF16_Optimizer, adam": ("BF16_Optimizer", ADAM),
}


@worlds(2)
@each(ADOPTED)
def case_other_optimizers_are_adopted_only_when_asked(directory, label, setting):
    """LAMB is ALTO with alpha 0. Both are saved with one parameter group, and adopted by a run with three."""
    cell, other = UNIVERSAL_CELLS[setting[0]], setting[1]
    folder = place(directory, label)
    with engine_for(cell, plain_groups, **other) as engine:
        advance(engine, 0, BEFORE)
        engine.save_checkpoint(folder, tag="saved")
        expected = {
            f"{n} {key}": safe_get_full_optimizer_state(p, key)
            for n, p in trainable(engine.module).items()
            for key in ("exp_avg", "exp_avg_sq")
        } | {f"{n} master": safe_get_full_fp32_param(p) for n, p in trainable(engine.module).items()}
    refused = pytest.raises(ValueError, match=r"no 'grad_ema' for ALTO: .*universal INPUT OUTPUT --adopt")
    with engine_for(cell, plain_groups) as engine, refused:
        engine.load_checkpoint(folder)
    if other is ADAM:
        with pytest.raises(ValueError, match="no 'grad_ema' and was not saved by ALTO.*--adopt"):
            on_rank_0(convert, folder / "saved", folder / "unasked")
    on_rank_0(stock_converter, folder / "saved", folder / "stock")
    on_rank_0(convert, folder / "saved", folder / "adopted", adopt=True)
    universal = {"checkpoint": {"load_universal": True}}
    with engine_for(cell, plain_groups, **universal) as engine, refused:
        engine.load_checkpoint(folder, tag="stock")
    with engine_for(cell, model=other_network(), **universal) as engine:
        own = hyperparameters(engine)
        engine.load_checkpoint(folder)
        assert hyperparameters(engine) == own
        got = picture(engine)
        assert_same("adopted", {key: got[key] for key in expected}, expected)
        averages = [value for key, value in got.items() if key.endswith("grad_ema")]
        assert averages
        assert not any(value.any() for value in averages)
        assert got["steps"].tolist() == [BEFORE]
        advance(engine, BEFORE, BEFORE + 1)
        assert picture(engine)["embed.weight grad_ema"].any()


@worlds(2)
@each({"adam": ADAM, "lamb": LAMB})
def case_stage_0_refuses_them_too(directory, label, setting):
    folder = place(directory, f"stage 0, {label}")
    with engine_for((None, {}), plain_groups, **setting) as engine:
        advance(engine, 0, 1)
        engine.save_checkpoint(folder, tag="saved")
    refused = pytest.raises(ValueError, match=r"no 'grad_ema' for ALTO: .*--adopt")
    with engine_for((None, {}), plain_groups) as engine, refused:
        engine.load_checkpoint(folder)
    with pytest.raises(ValueError, match="ZeRO stage 0 has none, and needs no conversion"):
        on_rank_0(convert, folder / "saved", folder / "universal")


@worlds(2)
@each(stage=(1, 2))
def case_adam_with_other_groups_is_told_of_adopt(directory, stage):
    """DeepSpeed called it "parameter-alignment layout", which misleads: ALTO's JSON makes two groups of one."""
    folder, cell = place(directory, f"one group, stage {stage}"), ({"stage": stage}, {})
    for options in (ADAM, {}):
        with engine_for(cell, plain_groups, **options) as engine:
            advance(engine, 0, 1)
            engine.save_checkpoint(folder, tag=options.get("name", "ALTO"))
    with engine_for(cell, None) as engine:
        with pytest.raises(ValueError, match=r"no 'grad_ema' for ALTO: it was not saved by ALTO.*OUTPUT --adopt"):
            engine.load_checkpoint(folder, tag="AdamW")
        with pytest.raises(ValueError, match="the checkpoint has 1 parameter groups, this optimizer has 2; build the"):
            engine.load_checkpoint(folder, tag="ALTO")
        engine.load_checkpoint(folder, tag="AdamW", load_optimizer_states=False)
    refused = pytest.raises(ValueError, match=r"no 'grad_ema' for ESGD: it was not saved by ESGD.*OUTPUT --adopt")
    with engine_for(cell, groups_of_esgd, **ESGD) as engine, refused:
        engine.load_checkpoint(folder, tag="AdamW")


@worlds(2)
@after("case_save", "stage 1")
def case_a_conversion_that_fails_leaves_nothing(directory):
    """What it had written refused the next try."""
    saved = place(directory, "stage 1") / "saved"

    def attempt():
        target, latest = directory / "fails" / "universal", directory / "fails" / "latest_universal"
        for before in (None, "an older one"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(universal, "_check_complete", lambda _: 1 / 0)
                with pytest.raises(ValueError, match=r"cannot be converted \(ZeroDivisionError: division by zero\)"):
                    convert(saved, target)
            assert not target.exists()
            assert (latest.read_text() if latest.exists() else None) == before
            convert(saved, target)
            assert latest.read_text() == "universal"
            shutil.rmtree(target)
            latest.write_text("an older one")

    on_rank_0(attempt)


#: What is given to the converter, where it should write, options, and the refusal.
NOT_CONVERTED = {
    "a folder with something in it": ("stage 1/saved", "stage 1", {}, "is not empty"),
    "a folder of tags": ("stage 1", "new", {}, "Give the folder of one tag"),
    "round robin": ("stage 1, round_robin/saved", "new", {}, "round_robin_gradients"),
    "nothing to adopt": ("stage 1/saved", "new", {"adopt": True}, "has grad_ema already: convert it without --adopt"),
}


@worlds(2)
@each(NOT_CONVERTED)
@after("case_save", "stage 1", "stage 1, round_robin")
def case_what_cannot_be_converted_is_refused(directory, setting):
    source, target, options, message = setting
    with pytest.raises(ValueError, match=message):
        on_rank_0(convert, place(directory, source), place(directory, target), **options)


#: The engine's cell and groups, the checkpoint, its tag, and the refusal.
NOT_LOADED = {
    "into stage 3": ("stage 3", three_groups, "stage 1", "universal", "do not go from stage 3 to another or back"),
    "from stage 3": ("stage 1", three_groups, "stage 3", "universal", "do not go from stage 3"),
    "other groups": ("stage 1", plain_groups, "stage 1", "universal", "has 3 parameter groups, this optimizer has 1"),
    "not universal": ("stage 1", three_groups, "stage 1", "saved", "is not a universal checkpoint: make one with"),
    "round robin": ("stage 1, round_robin", three_groups, "stage 1", "universal", "misplaces the pieces"),
    "into stage 0": (
        "stage 0", three_groups, "stage 1", "universal", "Stage 0 loads what stage 0 saved at any world size",
    ),
}  # fmt: skip


@worlds(2)
@each(NOT_LOADED)
@after("case_conversion_carries_every_state", "stage 1", "stage 3")
def case_what_cannot_be_loaded_is_refused(directory, setting):
    """Before anything has changed."""
    cell, groups, saved, tag, message = setting
    with engine_for(CELLS[cell], groups, checkpoint={"load_universal": True}) as engine:
        before = {name: value.clone() for name, value in weights(engine).items()}
        with pytest.raises(ValueError, match=message):
            engine.load_checkpoint(place(directory, saved), tag=tag)
        assert_same("unchanged", weights(engine), before)


@worlds(2)
@after("case_save", "stage 1")
def case_the_converter_does_not_run_what_a_file_names(directory):
    """A pickle may call any function. The converter loaded them all, and its workers did too."""
    saved = place(directory, "stage 1") / "saved"

    def attempt():
        trace = directory / "ran in the converter"
        for crafted in ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"):
            source, target = directory / f"crafted {crafted}", directory / "crafted universal"
            shutil.copytree(saved, source)
            content = torch.load(source / crafted, weights_only=False)
            torch.save({**content, "more": damage.Payload(trace)}, source / crafted)
            with pytest.raises(ValueError, match=f"holds more than data: {crafted} \\(.*mkdir"):
                convert(source, target, extract_workers=2, merge_workers=2)
            assert not target.exists()
            assert not trace.exists()
        content["more"] = fractions.Fraction(1, 2)
        torch.save(content, source / crafted)
        with pytest.raises(ValueError, match="fractions.Fraction.*name each of these after --allow"):
            convert(source, target)
        universal.main([str(source), str(target), "--allow", "fractions.Fraction"])
        assert (target / "zero" / "optimizer_state.pt").exists()
        with pytest.raises(SystemExit):
            universal.main([str(source), str(directory / "nowhere"), "--allow", "fractions.Fractions"])

    on_rank_0(attempt)


@worlds(2)
def case_elastic_checkpoints(directory):
    """They hold states alone: those of ALTO go on bit for bit, those of LAMB are refused, none can be converted."""
    for name, alpha in (("alto", PARAMS["alpha"]), ("lamb", 0)):
        with engine_for(ELASTIC, plain_groups, params={**PARAMS, "alpha": alpha}) as engine:
            advance(engine, 0, BEFORE)
            engine.save_checkpoint(place(directory, f"elastic {name}"), tag="saved")
            if name == "alto":
                advance(engine, BEFORE, BEFORE + AFTER)
                expected = weights(engine)
    with engine_for(ELASTIC, plain_groups, other_network()) as engine:
        engine.load_checkpoint(place(directory, "elastic alto"))
        advance(engine, BEFORE, BEFORE + AFTER)
        assert_same("elastic", weights(engine), expected)
    refused = pytest.raises(ValueError, match="group 0 was saved without 'grad_ema'")
    with engine_for(ELASTIC, plain_groups) as engine, refused:
        engine.load_checkpoint(place(directory, "elastic lamb"))
    with pytest.raises(ValueError, match="elastic_checkpoint"):
        on_rank_0(convert, place(directory, "elastic alto") / "saved", directory / "new")


@worlds(2)
@each(stage=(0, 1, 2, 3))
def case_esgd(directory, stage):
    """At the same world size."""
    cell = ({"stage": stage} if stage else None, {})
    folder = place(directory, f"ESGD {stage}")
    with engine_for(cell, None, **ESGD) as engine:
        advance(engine, 0, BEFORE)
        engine.save_checkpoint(folder, tag="saved")
        advance(engine, BEFORE, BEFORE + AFTER)
        at_end = weights(engine)
    with engine_for(cell, None, other_network(), **ESGD) as engine:
        engine.load_checkpoint(folder)
        advance(engine, BEFORE, BEFORE + AFTER)
        assert_same("continued", weights(engine), at_end)


SGD = {"name": "SGD", "params": {"lr": 0.05, "momentum": 0.9}, "zero_allow_untested_optimizer": True}


@worlds(2)
@each({"stage 1": 1, "stage 3": 3}, exhaustive={"stage 2": 2})
def case_esgd_is_converted_and_adopts(directory, label, setting):
    folder, cell = place(directory, f"ESGD, {label}"), ({"stage": setting}, {})
    universal = {"checkpoint": {"load_universal": True}}
    with engine_for(cell, groups_of_esgd, **ESGD) as engine:
        advance(engine, 0, BEFORE)
        engine.save_checkpoint(folder, tag="saved")
        at_save, saved_hyper = states_of_esgd(engine), hyperparameters(engine)
        advance(engine, BEFORE, BEFORE + AFTER)
        at_end = weights(engine)
    on_rank_0(convert, folder / "saved", folder / "universal")
    with pytest.raises(ValueError, match="was saved by ESGD: convert it without --adopt"):
        on_rank_0(convert, folder / "saved", folder / "unasked", adopt=True)
    if dist.get_rank() == 0:
        torch.save((at_save, at_end), folder / "pictures.pt")
    with engine_for(cell, groups_of_esgd, other_network(), **ESGD, **universal) as engine:
        engine.load_checkpoint(folder, tag="universal")
        assert_same("loaded", states_of_esgd(engine), at_save)
        assert hyperparameters(engine) == saved_hyper
        kept = {frozenset(state) for state in engine.basic_optimizer.state.values()}
        assert kept == {frozenset(("grad_ema",)), frozenset(("grad_ema", "momentum_buffer"))}, kept
        advance(engine, BEFORE, BEFORE + AFTER)
        assert_same("continued", weights(engine), at_end)
    with (
        engine_for(cell, None, **universal) as engine,
        pytest.raises(ValueError, match="for ALTO: it was not saved by"),
    ):
        engine.load_checkpoint(folder, tag="universal")
    with engine_for(cell, plain_groups, **SGD) as engine:
        advance(engine, 0, BEFORE)
        engine.save_checkpoint(folder, tag="sgd", save_latest=False)
        moments = {n: safe_get_full_optimizer_state(p, "momentum_buffer") for n, p in trainable(engine.module).items()}
    with pytest.raises(ValueError, match="was saved by SGD and has no 'grad_ema'.*give --adopt"):
        on_rank_0(convert, folder / "sgd", folder / "unasked")
    on_rank_0(convert, folder / "sgd", folder / "adopted", adopt=True)
    with engine_for(cell, groups_of_esgd, other_network(), **ESGD, **universal) as engine:
        own = hyperparameters(engine)
        engine.load_checkpoint(folder, tag="adopted")
        assert hyperparameters(engine) == own
        for key, value in states_of_esgd(engine).items():
            name, _, state = key.rpartition(" ")
            assert state != "grad_ema" or not value.any(), key
            assert state != "momentum_buffer" or torch.equal(value, moments[name]), key
        advance(engine, BEFORE, BEFORE + 1)


@worlds(2)
@each(adopted=("stage 1, adam", "stage 3, adam"))
@after("case_other_optimizers_are_adopted_only_when_asked")
def case_other_optimizers_load_as_ever(directory, adopted):
    """The wrapped methods pass on what is not ours."""
    folder, cell = place(directory, adopted), CELLS[ADOPTED[adopted][0]]
    with engine_for(cell, plain_groups, other_network(), **ADAM) as engine:
        engine.load_checkpoint(folder)
        expected = weights(engine)
    universal = {"load_universal": True}
    with engine_for(cell, plain_groups, other_network(), checkpoint=universal, **ADAM) as engine:
        engine.load_checkpoint(folder, tag="stock")
        assert_same("stock", weights(engine), expected)
        advance(engine, BEFORE, BEFORE + 1)
