"""The report of runs: what is on the page, in a real browser where there is one, and when it is written again."""

import html.parser
import json
import re
import shutil
import subprocess

import pytest

from alto_distributed.diagnostics import Reading
from alto_distributed.pretrain import cli, readings, report, starts
from alto_distributed.pretrain.report.palette import color, styles
from alto_distributed.pretrain.report.runs import RunRecords, by_kind, grouped, place, with_ratio
from tests.helpers.report_runs import made_up

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report of three runs, one of them under way."""
    folder = tmp_path_factory.mktemp("report")
    runs = [
        made_up(folder / "alto", layers=3, skipped=(50, 120)),
        made_up(folder / "llama-lamb", optimizer="lamb", kind="llama", layers=2, seed=2),
        made_up(folder / "<i>adamw", optimizer="adamw", steps=200, seed=3),
    ]
    change = {"time": "now", "step": 40, "changes": {"optimizer.lr": [0.01, 0.02]}}
    (folder / "alto" / "history.jsonl").write_text(json.dumps(change) + "\n")
    text, path = report.write(runs, folder / "into", refresh=7)
    return runs, text, path


class Page(html.parser.HTMLParser):
    """Collects what a page shows and what it asks for."""

    def __init__(self, text):
        super().__init__()
        self.words, self.images, self.links, self.tags, self.refresh = [], [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append(tag)
        self.links += [found[name] for name in ("src", "href", "srcset", "data", "action") if name in found]
        if tag == "img":
            self.images.append(found["alt"])
        if found.get("http-equiv") == "refresh":
            self.refresh = found["content"]

    def handle_data(self, data):
        self.words.append(data)


def test_a_page_holds_everything_and_asks_for_nothing(written):
    runs, text, path = written
    content = path.read_text()
    page = Page(content)
    assert page.images == [
        "loss and perplexity of alto, llama-lamb, <i>adamw",
        "learning rate, gradient norm, speed and memory of alto, llama-lamb, <i>adamw",
        *("trust ratios of alto", "trust ratios of llama-lamb"),
        *("trust ratios by layer of alto", "trust ratios by layer of llama-lamb"),
        *("norms and acceleration of alto", "norms and acceleration of llama-lamb"),
    ]
    # Nothing comes from elsewhere, nothing runs, and no name of a run is markup.
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert not {"script", "iframe", "object", "link", "i>adamw"} & set(page.tags)
    assert "@import" not in content
    assert "url(" not in content
    words = " ".join(page.words)
    for said in (
        "2 of 3 runs are complete.",
        "8 ranks: alto pretrain '<b>'",
        "torch 2.13.0",
        "8 x a GPU",
        "<i>adamw",
        "lr 0.01 -> 0.02",
    ):
        assert said in words, said
    assert 'optimizer: {name: "lamb"' in words
    assert re.search(r"seed\s+2\b", words)
    assert page.refresh == "7"
    assert color("alto") in content
    assert "| llama-lamb |" in text
    for name in ("report", "report-training", "report-trust-ratios-alto", "report-layers-alto", "report-norms-alto"):
        assert (path.parent / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (path.parent / f"{name}.svg").read_bytes().startswith(b"<?xml")
    assert [row["run"] for row in json.loads((path.parent / "report.json").read_text())] == [run.name for run in runs]


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_a_browser_shows_it(written, tmp_path):
    """All images are decoded, and there is something in each third of the page."""
    _, _, path = written
    shown = path.with_name("shown.html")
    # The page itself has no script. This copy tells how large its images came out.
    count = "[...document.images].map(i => i.complete && i.naturalWidth > 300 && i.naturalHeight > 100)"
    script = f"<script>onload = () => {{ document.title = 'images ' + {count} }}</script>"
    shown.write_text(path.read_text().replace("</head>", script + "</head>"))
    picture = tmp_path / "page.png"
    browser = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1250,3600"]
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path}"]
    asked = [*browser, *offline, "--dump-dom", f"--screenshot={picture}", shown.as_uri()]
    dumped = subprocess.run(asked, capture_output=True, text=True, timeout=300)
    images = re.search(r"<title>images (.*?)</title>", dumped.stdout).group(1)
    assert images == ",".join(["true"] * 8), dumped.stderr[-2000:]
    from PIL import Image

    whole = Image.open(picture).convert("RGB")
    assert whole.size == (1250, 3600)
    for third in range(3):
        colors = whole.crop((0, 1200 * third, 1250, 1200 * (third + 1))).getcolors(1 << 20)
        assert len(colors) > 200
        assert max(n for n, _ in colors) < 0.97 * 1250 * 1200  # not a blank sheet


def test_an_optimizer_has_one_color_and_its_runs_other_dashes():
    chosen = styles(["adamw", "alto", "adamw", "something"])
    assert [style["color"] for style in chosen] == [color("adamw"), color("alto"), color("adamw"), color("?")]
    assert chosen[0]["linestyle"] != chosen[2]["linestyle"]
    assert chosen[0]["linestyle"] == chosen[1]["linestyle"]


def test_parameters_are_ordered_by_kind_and_layer():
    layers = ("10.mlp.c_fc", "2.mlp.c_fc", "2.attn.c_attn")
    names = [*(f"transformer.h.{name}.weight" for name in layers), "lm_head.weight", "transformer.wte.weight"]
    assert [place(name).name for name in grouped(names)] == [
        *("wte", "attn.c_attn 2", "mlp.c_fc 2", "mlp.c_fc 10", "lm_head")
    ]
    assert list(by_kind(names)) == ["attn.c_attn", "mlp.c_fc"]
    one = {name: Reading(1.0 if "wte" in name else 0.5, 1, 1, 0) for name in names}
    assert "transformer.wte.weight" not in with_ratio({5: one})


def test_a_watch_ends_with_the_runs(tmp_path):
    run, said, slept = made_up(tmp_path / "run", optimizer="adamw", steps=200), [], []

    def sleep(seconds):
        slept.append(seconds)
        assert Page((tmp_path / "report.html").read_text()).refresh == "5"
        shutil.rmtree(run)
        made_up(run, optimizer="adamw", steps=400)

    report.watch([run], tmp_path, 5, said.append, sleep)
    assert slept == [5]
    assert [line.partition(": ")[2] for line in said] == ["run step 200", "run step 400; complete"]
    assert Page((tmp_path / "report.html").read_text()).refresh is None


def test_the_command_watches_until_the_run_is_complete_or_it_is_interrupted(tmp_path, capsys, monkeypatch):
    run = made_up(tmp_path / "run", optimizer="adamw")
    cli.main(["report", str(run), "--watch"])
    assert capsys.readouterr().out == f"{run}/report.html: run step 400; complete\n"

    def interrupted(runs, into, seconds, say):
        assert (runs, into, seconds) == ([run], tmp_path, 7)
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "watch", interrupted)
    cli.main(["report", str(run), "--into", str(tmp_path), "--watch", "--every", "7"])


def test_a_watch_ends_with_a_run_that_diverged(tmp_path):
    """It waited for a last step that would never come."""
    run, said = made_up(tmp_path / "run", optimizer="adamw", steps=200), []
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 201, "diverged": True}) + "\n")
    report.watch([run], tmp_path, 5, said.append, lambda _: pytest.fail("it waits"))
    assert said[0].endswith("run step 201; run diverged")
    assert "1 of 1 runs diverged" in (tmp_path / "report.html").read_text()


def test_a_run_of_an_older_version_and_damaged_files_are_shown(tmp_path):
    """No history, no readings, and lines that are none."""
    run = made_up(tmp_path / "old-lamb", optimizer="adamw")
    (run / "starts.jsonl").write_text("{}\n\xff\n")
    (run / "diagnostics.jsonl").write_text('{"step": 1, "parameters": {"a": [1]}}\n{"step": "x"}\n[]\n{')
    found = RunRecords(run)
    assert (found.optimizer, found.readings, found.starts) == ("lamb", {}, [])
    _, path = report.write([run], tmp_path)
    assert "did not write this down" in path.read_text()


def test_readings_of_steps_that_are_repeated_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(readings, "gather_on_rank0", lambda own: [own, {"b": Reading(2, 2, 2, 2)}])
    log = readings.ReadingsLog(tmp_path, 0)
    for step in (10, 20):
        assert set(log.record(step, {"a": Reading(step, 1, 1, 0)})) == {"a", "b"}
    resumed = readings.ReadingsLog(tmp_path, 10)
    resumed.record(20, {"a": Reading(99, 1, 1, 0)})
    found = readings.read(tmp_path)
    assert list(found) == [10, 20]
    assert found[10]["a"].trust_ratio == 10
    assert found[20]["a"].trust_ratio == 99


def test_a_disk_that_refuses_does_not_end_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(readings, "gather_on_rank0", lambda own: [own])
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"diagnostics.jsonl of this run cannot be written"):
        readings.ReadingsLog(tmp_path / "file", 0).record(1, {"a": Reading(1, 1, 1, 0)})
    from alto_distributed.pretrain.config.settings import Run

    with pytest.warns(UserWarning, match=r"starts.jsonl cannot be written"):
        starts.note_start(tmp_path / "file", Run(), 0, 1)


def test_the_interval_of_a_watch_is_checked(tmp_path):
    with pytest.raises(SystemExit, match="--every 0: it must be a second at least"):
        cli.main(["report", str(tmp_path), "--watch", "--every", "0"])
