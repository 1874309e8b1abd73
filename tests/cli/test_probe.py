"""`mgtp probe` on ranks of the CPU, and the pure parts: cross-over points and the plot."""

from __future__ import annotations

import io
import json
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from PIL import Image

from mgtp.cli import latency_plot as plots
from mgtp.cli.latency_plot import latency_plot
from mgtp.runtime.collectives.crossover import cross_overs
from mgtp.runtime.launch.device_probe import Choice, ProbeResult
from mgtp.runtime.messages import CollectiveFigure, LinkInfo
from mgtp.shardplan.errors import UsageError
from tests.processes import mgtp, mgtp_here


@pytest.fixture
def short_folder():
    """A short path, for the Unix sockets of runs."""
    with tempfile.TemporaryDirectory(prefix="mgtp-test-") as folder:
        yield Path(folder)


def test_ranks_on_the_cpu(short_folder):
    plot = short_folder / "latency.svg"
    run = mgtp(short_folder, "probe", "--tp-size", "2", "--device", "cpu", "--plot", str(plot), "--json")
    result = json.loads(run.out)
    assert set(result) == {
        "torch_version", "nccl_version", "driver_version", "devices", "links", "collectives", "choice", "faults"
    }  # fmt: skip
    assert [d["rank"] for d in result["devices"]] == [0, 1] and result["links"] == []
    assert {f["backend"] for f in result["collectives"]} == {"host"}
    assert [f["size"] for f in result["collectives"]] == [1 << p for p in range(10, 27)]
    for f in result["collectives"]:
        assert set(f) == {"backend", "size", "world", "latency", "bandwidth", "verified"}
        assert f["verified"] and f["world"] == 2 and f["latency"] > 0
        assert f["bandwidth"] == pytest.approx(f["size"] / f["latency"])
    assert result["choice"]["backend"] == "host"
    assert result["choice"]["cross_overs"] == [{"size": 1024, "backend": "host"}]
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_data_that_arrives_changed_is_shown_and_fails(monkeypatch, capsysbinary):
    """Else a script would take the cards for good ones."""
    from mgtp.cli.app import main

    figures = [CollectiveFigure("host", size, 2, 1.0, 1.0, size == 1024) for size in (1024, 2048, 4096)]
    link = LinkInfo(0, 1, "NVLink", 18, True, False, 1e11)
    found = ProbeResult("2", None, None, [], [link], figures, Choice("host", "", []), {})
    monkeypatch.setattr("mgtp.runtime.launch.device_probe.probe_devices", lambda *_: found)
    for options, words in (([], b"WRITTEN DATA DIFFERS"), (["--json"], b'"written":false')):
        assert main(["probe", "--tp-size", "2", "--device", "cpu", *options]) == 1
        out, err = capsysbinary.readouterr()
        assert words in out
        assert b"error: data has arrived changed: the link 0 -> 1, host over 2 ranks\n" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--plot", "x.pdf", "--tp-size", "2"), ".pdf is not .svg or .png"),
        (("--plot", "x.svg"), "one rank has no collectives to draw"),
        (("--plot", "/nowhere/x.svg", "--tp-size", "2"), "/nowhere/x.svg: No such file or directory"),
        (("--collective", "ring"), "'ring' is unknown"),
        (("--collective", "nccl", "--tp-size", "2"), "--collective nccl needs GPUs"),
    ],
)
def test_what_is_refused_before_anything_starts(options, words):
    assert words in mgtp_here("probe", "--device", "cpu", *options, code=2).err


def figures(*rows: tuple[str, int, float, bool]) -> list[CollectiveFigure]:
    return [CollectiveFigure(b, size, 2, seconds, size / seconds, right) for b, size, seconds, right in rows]


def test_cross_overs():
    measured = figures(
        ("nccl", 1024, 2e-5, True), ("nccl", 2048, 2e-5, True), ("nccl", 4096, 2e-5, True), ("nccl", 8192, 3e-5, True),
        ("oneshot", 1024, 5e-6, True), ("oneshot", 2048, 1e-5, True), ("oneshot", 4096, 3e-5, True),
        ("host", 1024, 1e-6, False),
    )  # fmt: skip
    found = [(c.size, c.backend) for c in cross_overs(measured)]
    assert found == [(1024, "oneshot"), (4096, "nccl")], "a wrong sum must not win"
    assert cross_overs([]) == []


MEASURED = (("nccl", 1024, 2e-5, True), ("nccl", 2048, 3e-5, True), ("oneshot", 1024, 5e-6, True))


def test_the_plot_names_every_backend():
    svg = latency_plot(figures(*MEASURED), ".SVG")
    texts = [e.text for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("text")]
    assert {"nccl", "oneshot", "1 KiB", "10 us"} <= set(texts)


def test_the_plot_as_png():
    image = Image.open(io.BytesIO(latency_plot(figures(*MEASURED), ".png")))
    colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20) or ()}
    assert image.format == "PNG" and {(0x2B, 0x6C, 0xB0), (0xC0, 0x56, 0x21)} <= colours


def test_a_png_without_pillow_is_refused(monkeypatch):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="need Pillow"):
        plots.check_ending(".png")
    plots.check_ending(".svg")
