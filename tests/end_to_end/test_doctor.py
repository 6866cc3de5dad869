"""``python -m alto_distributed doctor``: the page, the JSON, the exit code; each thing that can be wrong."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
import types
import warnings
from pathlib import Path

import pytest

import alto_distributed
from alto_distributed import doctor
from alto_distributed.doctor import checks, child, engines, examination, facts, processes
from alto_distributed.doctor.benchmark import block
from alto_distributed.doctor.report import page
from alto_distributed.errors import UnsupportedVersion
from alto_distributed.framework_import import explained
from tests.helpers.launcher import EXHAUSTIVE, REPO, environment


def run(*arguments, first=None, **variables):
    """Start it as a user does. ``first`` is a directory whose modules come before the installed ones."""
    path = os.pathsep.join(map(str, filter(None, [first, REPO])))
    command = [sys.executable, "-m", "alto_distributed", "doctor", *arguments]
    variables = {**environment(), "PYTHONPATH": path, **variables}
    return subprocess.run(command, cwd=REPO, env=variables, capture_output=True, text=True, timeout=300, check=False)


def modules(directory, **sources):
    """Write modules for PYTHONPATH; a name with two underscores is one in a package."""
    for name, source in sources.items():
        path = Path(directory, *name.split("__")).with_suffix(".py")
        if path.stem == "init":
            path = path.with_name("__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return directory


def by_name(rows):
    return {row["name"]: row for row in rows}


# -- this machine ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def healthy():
    done = run("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_nothing_is_wrong_here(healthy):
    assert healthy["ok"]
    assert healthy["problems"] == []
    assert healthy["alto_distributed"] == alto_distributed.__version__
    statuses = {name: row["status"] for name, row in by_name(healthy["checks"]).items()}
    for kernel in ("reference", "torch", "native"):
        assert statuses[f"kernel {kernel} on cpu"] == "ok"
    assert statuses["save and load on cpu"] == "ok"
    assert statuses["two ranks on cpu"] == "ok"
    assert "failed" not in statuses.values()
    names = {name: row["status"] for name, row in by_name(healthy["engines"]).items()}
    assert list(names) == ["PyTorch, FSDP2", "DeepSpeed", "Megatron", "training program"]
    assert set(names.values()) <= {"supported", "untested", "not installed"}


def test_the_keys_of_the_json_are_stable(healthy):
    """Tickets are read by programs too. A new key is welcome; one that goes needs another FORMAT."""
    assert healthy["format"] == 1
    top = {"alto_distributed", "python", "platform", "torch", "packages", "apex", "cuda", "compiler", "threads"}
    assert top | {"huge_pages", "devices", "engines", "checks", "problems", "ok"} <= set(healthy)
    assert {"version", "build", "toolkit", "vendor", "from"} <= set(healthy["torch"])
    assert {"triton", "deepspeed", "megatron-core", "transformer-engine"} <= set(healthy["packages"])
    for engine in healthy["engines"]:
        assert set(engine) == {"name", "status", "version", "from", "message"}
    for check in healthy["checks"]:
        assert set(check) == {"name", "status", "message", "seconds"}


def test_the_page_says_what_the_json_says(healthy):
    text = page(healthy)
    assert text.endswith("Nothing is wrong.")
    for row in [*healthy["engines"], *healthy["checks"]]:
        parts = (row["name"], row["status"], row["message"])
        assert any(all(part in line for part in parts) for line in text.splitlines()), parts
    for words in (healthy["torch"]["version"], "megatron-core", "TransformerEngine", "apex", "huge pages", "threads"):
        assert words in text
    assert len(text.splitlines()) < 50
    wrong = page({**healthy, "ok": False, "problems": ["first", "second"]})
    assert wrong.endswith("Problems\n  1. first\n  2. second")


def test_no_name_of_the_user_is_in_it(monkeypatch):
    monkeypatch.setenv("HOME", "/data/jane")
    found = facts.without_home({"a": ["/data/jane/x", "in /home/joe/y:", "/data/janet"], "b": 1, "c": None})
    assert found == {"a": ["~/x", "in ~/y:", "/data/janet"], "b": 1, "c": None}
    assert facts.without_home(f"({sysconfig.get_path('purelib')}/x.py)") == "(site-packages/x.py)"


# -- a machine where everything is wrong -------------------------------------------------------------------

#: A step of one kernel that is a hundredth too large. Both ranks die, the second at once.
WRONG_KERNEL_AND_RANKS = """
import os, sys, time
if "checks" in sys.orig_argv:  # it needs torch alone
    others = ("numpy", "yaml", "packaging", "triton", "deepspeed", "megatron", "transformers", "tqdm")
    sys.modules.update(dict.fromkeys(others))
if "rank" in sys.orig_argv:
    time.sleep(0.2) if sys.orig_argv[-3] == "0" else None
    os.kill(os.getpid(), 11)
if "checks" in sys.orig_argv:
    from alto_distributed.kernels import chunked
    right = chunked.phase_two
    chunked.phase_two = lambda shards, step_sizes, prepared=None: right(shards, step_sizes * 1.01)
"""
OLD_MEGATRON = """Metadata-Version: 2.1
Name: megatron-core
Version: 0.9.0
Requires-Dist: numpy<2.0.0
Requires-Dist: nobody; extra == "dev"
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    first = tmp_path_factory.mktemp("broken")
    modules(
        first,
        sitecustomize=WRONG_KERNEL_AND_RANKS,
        apex__init="",  # Megatron imports it, and finds nothing in it
        deepspeed__init="from torch import what_a_later_release_dropped",
        megatron__core__init="__version__ = '0.9.0'\nimport numpy\nnumpy.product",  # numpy 2 has none
    )
    (first / "megatron_core-0.9.0.dist-info").mkdir()
    (first / "megatron_core-0.9.0.dist-info" / "METADATA").write_text(OLD_MEGATRON)
    (first / "bin").mkdir()
    variables = {"PATH": str(first / "bin"), "CC": "", "ALTO_CACHE_DIR": str(first / "cache")}
    done = run("--json", first=first, **variables)
    assert done.returncode == 1, done.stdout + done.stderr
    return json.loads(done.stdout)


def problem(found, subject):
    (line,) = [line for line in found["problems"] if line.startswith(subject)]
    assert "\n" not in line
    return line


def test_a_kernel_that_computes_something_else_is_told(broken):
    assert by_name(broken["checks"])["kernel torch on cpu"]["status"] == "failed"
    assert 'do not train with kernel="torch"' in problem(broken, "kernel torch on cpu")
    assert by_name(broken["checks"])["kernel reference on cpu"]["status"] == "ok"


def test_a_rank_that_dies_is_told(broken):
    line = problem(broken, "two ranks on cpu")
    assert "its process ended with SIGSEGV; check that processes of this machine reach each other" in line


def test_a_missing_compiler_is_told(broken):
    check = by_name(broken["checks"])["kernel native on cpu"]
    assert check["status"] == "skipped"
    assert "no C compiler was found: install one (cc, gcc or clang), or name one with CC" in check["message"]
    assert broken["compiler"]["command"] is None
    # ALTO falls back to another kernel, so this alone is no failure.
    assert not any("compiler" in line for line in broken["problems"])


def test_the_namesake_of_apex_is_told(broken):
    assert broken["apex"]["kind"] == "namesake"
    assert "pip uninstall apex" in problem(broken, "apex")
    assert "not NVIDIA's" in page(broken)


def test_a_framework_that_cannot_be_imported_is_told(broken):
    engine = by_name(broken["engines"])["DeepSpeed"]
    assert engine["status"] == "refused"
    assert engine["version"] is None  # pip knows one, but another would be imported
    line = problem(broken, "DeepSpeed")
    assert re.search(
        r"deepspeed cannot be imported with torch 2\S+ \(ImportError: cannot import name 'what_a_later", line
    )
    assert line.endswith("pip install another release of it that fits this torch, or pip uninstall deepspeed")


def test_a_framework_that_cannot_be_imported_is_told_at_import_too(tmp_path):
    modules(tmp_path, deepspeed__init="from torch import what_a_later_release_dropped")
    path = os.pathsep.join([str(tmp_path), str(REPO)])
    done = subprocess.run(
        [sys.executable, "-c", "import alto_distributed.deepspeed.universal"],
        cwd=REPO,
        env={**environment(), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("alto_distributed.errors.UnsupportedVersion: deepspeed cannot be imported with torch ")
    assert last.endswith("or pip uninstall deepspeed")


def test_a_framework_that_is_not_installed_is_pythons_own_error():
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"), explained("no_such_module", "x"):
        importlib.import_module("no_such_module")
    with pytest.raises(UnsupportedVersion, match="x cannot be imported .*No module named 'what_it_needs'"):  # noqa: SIM117
        with explained("no_such_module", "x"):
            importlib.import_module("what_it_needs")
    with pytest.raises(ModuleNotFoundError), explained("torch", "torch"):  # it is there, and lacks something of ours
        importlib.import_module("torch.what_it_never_had")


def test_frameworks_that_require_different_versions_are_told(broken):
    line = problem(broken, "Megatron")
    have = broken["packages"]["numpy"]
    said = f"megatron-core requires numpy<2.0.0, and {have} is installed; pip install 'numpy<2.0.0'"
    assert said in line
    assert by_name(broken["engines"])["Megatron"]["version"] == "0.9.0"


def test_without_an_engine_there_is_no_training_program(broken):
    engine = by_name(broken["engines"])["training program"]
    assert engine["status"] == "refused"
    assert "needs DeepSpeed or Megatron" in engine["message"]


# -- one thing at a time -----------------------------------------------------------------------------------


def test_a_torch_that_is_too_old_is_told_with_the_facts(tmp_path):
    modules(tmp_path, sitecustomize="import torch; torch.__version__ = '2.5.1'")
    done = run(first=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "1. PyTorch, FSDP2: alto_distributed needs torch 2.6 or newer, and 2.5.1 is installed" in done.stdout
    assert "pip install 'torch>=2.6'" in done.stdout
    assert "C compiler" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_torch_that_cannot_be_imported_is_told(tmp_path):
    modules(tmp_path, torch__init="raise OSError('libcudart.so.12: cannot open shared object file')")
    done = run(first=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "torch cannot be imported (OSError: libcudart.so.12: cannot open shared object file); install it" in line
    others = subprocess.run(
        [sys.executable, "-c", "import alto_distributed"],
        env={**environment(), "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert others.stderr.endswith("OSError: libcudart.so.12: cannot open shared object file\n")


def test_it_needs_torch_alone():
    """The checks, too: see ``broken``."""
    others = ["numpy", "yaml", "packaging", "triton", "deepspeed", "megatron", "transformers", "tqdm", "psutil"]
    program = f"import sys; sys.modules.update(dict.fromkeys({others}))\n"
    program += "from alto_distributed import doctor\nfrom alto_distributed.doctor import engines, facts\n"
    program += "facts.facts(); [engines.framework(f, 1.0) for f in engines.FRAMEWORKS]; engines.training_program([])"
    subprocess.run([sys.executable, "-c", program], cwd=REPO, env=environment(), check=True)


def test_ranks_that_hang_are_told(tmp_path, monkeypatch):
    modules(tmp_path, sitecustomize="import sys, time\nif 'rank' in sys.orig_argv: time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = examination.two_ranks("cpu", seconds=1.0)
    assert check["status"] == "failed"
    assert check["message"].startswith("it did not end within 1 s; check that processes of this machine reach each")


def test_a_rank_that_dies_stops_the_one_that_waits_for_it(tmp_path, monkeypatch):
    dies = "import os, sys, time\nif 'rank' in sys.orig_argv:\n    "
    dies += "time.sleep(600) if sys.orig_argv[-3] == '0' else os.kill(os.getpid(), 11)"
    modules(tmp_path, sitecustomize=dies)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(processes, "GRACE", 0.2)
    began = time.monotonic()
    check = examination.two_ranks("cpu", seconds=100.0)
    assert time.monotonic() - began < 50
    assert check["status"] == "failed"
    assert "SIGSEGV" in check["message"]


def test_control_c_stops_its_processes(tmp_path):
    hangs = "import os, sys, time\nif len(sys.orig_argv) > 4 and sys.orig_argv[1] == '-c':\n"
    hangs += f"    open(os.path.join({str(tmp_path)!r}, str(os.getpid())), 'w')\n    time.sleep(600)\n"
    modules(tmp_path, sitecustomize=hangs)
    variables = {**environment(), "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"}
    command = [sys.executable, "-m", "alto_distributed", "doctor"]
    process = subprocess.Popen(
        command,
        cwd=REPO,
        env=variables,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    try:
        deadline = time.monotonic() + 50
        while len(started := [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
        assert b"Traceback" not in process.stderr.read()
    finally:
        process.kill()
    for child_id in started:
        with pytest.raises(ProcessLookupError):
            os.kill(child_id, 0)


def test_a_check_that_hangs_is_told_and_those_after_it_too(monkeypatch):
    records = [{"devices": [{"device": "cpu"}]}, {"planned": ["a", "b", "c"]}, {"begun": "a"}]
    records += [{"name": "a", "status": "ok", "message": "", "seconds": 0.1}, {"begun": "b"}]
    ended = processes.Ended(records, "it did not end within 60 s")
    monkeypatch.setattr(processes, "run", lambda *roles, seconds: [ended])
    devices, rows = examination.run_checks(60.0)
    assert devices == [{"device": "cpu"}]
    assert [(row["name"], row["status"]) for row in rows] == [("a", "ok"), ("b", "failed"), ("c", "skipped")]
    assert rows[1]["message"] == "it did not end within 60 s"
    assert "because of b" in rows[2]["message"]


def test_a_driver_that_hangs_is_told(monkeypatch):
    monkeypatch.setattr(processes, "run", lambda *roles, seconds: [processes.Ended([], "it did not end within 60 s")])
    devices, rows = examination.run_checks(60.0)
    assert devices == []
    assert [(row["name"], row["status"]) for row in rows] == [("devices", "failed")]


def test_a_process_that_reports_nothing_is_stopped_and_one_that_reports_is_not(tmp_path, monkeypatch):
    slow = "import sys, time\nif 'hang' in sys.argv: time.sleep(600)\n"
    slow += "for n in range(4):\n    time.sleep(0.3)\n    open(sys.argv[1], 'a').write('{\"n\": %d}\\n' % n)\n"
    slow += "open(sys.argv[1], 'a').write('{\"n\"')\n"  # not whole
    monkeypatch.setattr(processes, "PROGRAM", "import sys; sys.argv.pop(1)\n" + slow)
    (ended,) = processes.run(["talk"], seconds=0.9)
    assert ended == processes.Ended([{"n": n} for n in range(4)], None)
    (ended,) = processes.run(["hang"], seconds=0.3)
    assert ended == processes.Ended([], "it did not end within 0.3 s")


@pytest.mark.slow
def test_a_sharded_step_without_the_collective_is_found_wrong(tmp_path, monkeypatch):
    """What the check of two ranks is for."""
    alone = "import sys\nif 'rank' in sys.orig_argv:\n    from alto_distributed.sharding import norms\n"
    alone += "    norms.start_all_reduce = lambda table, group: lambda: table\n"
    modules(tmp_path, sitecustomize=alone)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(REPO)]))
    check = examination.two_ranks("cpu", seconds=100.0)
    assert check["status"] == "failed"
    assert "sharded steps differ from unsharded ones" in check["message"]


def test_a_checkpoint_that_loses_something_is_found(monkeypatch):
    import torch

    loaded = torch.load

    def forgetful(*args, **options):
        saved = loaded(*args, **options)
        saved["optimizer"]["state"][0]["grad_ema"] *= 1.01
        return saved

    assert child.outcome(lambda: checks.resumes(torch.device("cpu")))["status"] == "ok"
    monkeypatch.setattr(torch, "load", forgetful)
    found = child.outcome(lambda: checks.resumes(torch.device("cpu")))
    assert (found["status"], found["message"][:8]) == ("failed", "weight 0")


def test_gpus_that_torch_cannot_use_are_told(monkeypatch):
    def found(build, gpus):
        return {"cuda": {"driver_gpus": gpus, "driver": "470.1", "cuda": "12.8"}, "torch": {"build": build}}

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (check,) = examination.unseen(found("cuda", 2), [])
    assert check["status"] == "failed"
    assert "nvidia-smi lists 2" in check["message"]
    assert examination.unseen(found("cuda", 2), ["cuda:0"]) == []
    assert examination.unseen(found("cpu", 2), []) == []
    assert examination.unseen(found("cuda", 0), []) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # they are hidden
    assert examination.unseen(found("cuda", 2), []) == []


def test_a_framework_that_is_not_there_is_no_problem():
    nothing = engines.Framework("Nothing", "nothing", "no_such_module.core", "no-such-package")
    engine = engines.framework(nothing, 60.0)
    assert engine["status"] == "not installed"
    assert "pip install '.[nothing]'" in engine["message"]
    assert examination.problems({"engines": [engine], "apex": {"kind": None}, "checks": []}) == []


def test_what_a_framework_folder_says_is_the_status(monkeypatch):
    def ask(check, warn=lambda: None):
        versions = types.SimpleNamespace(check_version=check, warn_if_untested=warn)
        monkeypatch.setitem(sys.modules, "alto_distributed.some", types.ModuleType("some"))
        monkeypatch.setitem(sys.modules, "alto_distributed.some.versions", versions)
        monkeypatch.setitem(sys.modules, "some", types.SimpleNamespace(__version__="1.2"))
        return child.ask("some", "some", "some-package")

    def refuse():
        raise UnsupportedVersion("some 1.2 lacks a method")

    def fail():
        raise AttributeError("no method")

    assert ask(lambda: None) == {"status": "supported", "message": "", "version": "1.2"}
    untested = ask(lambda: None, lambda: warnings.warn("some 1.2 is untested", stacklevel=1))
    assert (untested["status"], untested["message"]) == ("untested", "some 1.2 is untested")
    assert ask(lambda: warnings.warn("something else", stacklevel=1))["status"] == "supported"
    assert (ask(refuse)["status"], ask(refuse)["message"]) == ("refused", "some 1.2 lacks a method")
    assert ask(fail)["message"].startswith("it cannot be used: AttributeError: no method; pip install another release")


@pytest.mark.parametrize(
    ("version", "cuda", "hip", "build", "vendor"),
    [
        ("2.13.0+cpu", None, None, "cpu", None),
        ("2.13.0", "13.0", None, "cuda", None),
        ("2.9.0a0+145a3a7bda.nv25.10", "13.0", None, "cuda", "nv25.10"),
        ("2.9.0+rocm6.4", None, "6.4.43482", "rocm", None),
    ],
)
def test_builds_of_torch(version, cuda, hip, build, vendor, monkeypatch):
    monkeypatch.setattr("torch.__version__", version)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("torch.version.hip", hip)
    found = facts.torch_facts()
    assert (found["version"], found["build"], found["vendor"]) == (version, build, vendor)


def test_nvidias_apex_is_known_by_its_modules(tmp_path, monkeypatch):
    modules(tmp_path, apex__init="raise RuntimeError('it must not be imported')", apex__multi_tensor_apply__init="")
    monkeypatch.syspath_prepend(tmp_path)
    assert facts.apex_facts()["kind"] == "nvidia"


@pytest.mark.slow
def test_the_namesake_of_apex_is_warned_of_where_megatron_is_used(tmp_path, monkeypatch):
    from alto_distributed import apex

    apex.warn_of_namesake()
    modules(tmp_path, apex__init="")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match="is not NVIDIA's.*pip uninstall apex"):
        apex.warn_of_namesake()
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    program = "import alto_distributed.megatron"
    variables = {**environment(), "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPO)])}
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, env=variables, capture_output=True, text=True)
    assert done.returncode == 0
    assert 'UserWarning: the package "apex" here is not NVIDIA\'s' in done.stderr


def test_what_is_wrong_with_the_command_is_one_line(capsys):
    for nonsense in ("0", "-1", "nan", "soon"):
        with pytest.raises(SystemExit) as ended:
            doctor.main(["--timeout", nonsense])
        (line,) = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2
        assert f"argument --timeout: {nonsense} is not a number of seconds above 0; see " in line
    with pytest.raises(SystemExit):
        doctor.main(["--jsno"])
    assert capsys.readouterr().err == (
        "alto_distributed doctor: unrecognized arguments: --jsno; see alto_distributed doctor --help\n"
    )


@pytest.mark.slow
@pytest.mark.skipif(not EXHAUSTIVE, reason="a variation: EXHAUSTIVE=1 runs it")
def test_kernels_are_checked_on_an_accelerator_and_ranks_over_its_backend(tmp_path, monkeypatch):
    """On the pretend one (tests/helpers/pretend)."""
    there = "import sys\nif 'alto_distributed.doctor' in sys.orig_argv[2]:\n"
    there += "    from tests.helpers import pretend\n    pretend.install()\n"
    modules(tmp_path, sitecustomize=there)
    path = os.pathsep.join([str(tmp_path), str(REPO)])
    for name, value in {**environment(), "PYTHONPATH": path}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(engines, "FRAMEWORKS", ())
    found = examination.examine(300.0)
    devices, rows = found["devices"], by_name(found["checks"])
    assert devices[1] == {"device": "pretend:0", "name": "pretend", "memory": 80 << 30, "capability": "8.0"}
    usual = [f"{what} on pretend:0" for what in ("kernel torch", "kernel reference", "save and load")]
    for name in (*usual, "kernel torch on pretend:1", "two ranks on cpu", "two ranks on pretend"):
        assert rows[name]["status"] == "ok", rows
    assert rows["kernel triton on pretend:0"]["status"] == "skipped"
    assert "over pretend" in rows["two ranks on pretend"]["message"]
    assert found["ok"]
    assert re.search("pretend:0 .*80 GiB, capability 8.0", page(found))


def test_the_benchmark_measures_what_is_here_and_says_what_is_not():
    done = run("--benchmark", "--json", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found["rows"]}
    assert {"copy", "AdamW (torch fused)", "ALTO (C)", "ALTO (torch)"} < rows.keys()
    for name, row in rows.items():
        if "apex" not in name:
            assert row["milliseconds"] > 0, row
            assert row["GB/s"] > 0, row
    assert "apex" in rows["LAMB (apex FusedLAMB)"]["left out"] or rows["LAMB (apex FusedLAMB)"]["GB/s"]
    pasted = block(found["rows"], found["machine"]).splitlines()
    assert pasted[0] == "```text"
    assert pasted[-1] == "```"
    assert any(line.startswith("ALTO (C) ") and line.endswith("%") for line in pasted)
