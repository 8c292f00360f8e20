"""The demonstration's page: whole, self-contained, and honest about what was not measured."""

import base64
import html.parser
import json
import math
import re
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from gradwire.cli.main import app
from gradwire.recipes.base import Composition
from gradwire_lab.bench.units import bytes_text, ratio_text, seconds_text
from gradwire_lab.demo.curves import on_slow_link, smooth
from gradwire_lab.demo.race import Course
from gradwire_lab.report import svg
from gradwire_lab.report.charts import (
    WIDE,
    WIDTH,
    BarPart,
    Mark,
    Series,
    Spot,
    line_chart,
    stacked,
    thin,
)
from gradwire_lab.report.page import TIMES_LEGEND, file_of, loss_over_time, render


def row(kind, step_s, **fields):
    values = dict.fromkeys(
        ("data_s", "forward_s", "backward_s", "exposed_comm_s", "optimizer_s", "cpu_s"), step_s / 5
    )
    values |= {"name": kind, "kind": kind, "step_s": step_s, "scaling": 0.1 / step_s, "report": None}
    values |= {"wire_bytes_per_step": 1e6, "interface_bytes_per_step": 1.01e6, "compress_s": None}
    return values | {"speedup_over_ddp": {"ratio": 3.0, "low": 2.9, "high": 3.1}} | fields


def course(name, seed, shaped=30):
    losses = [2.3 * math.exp(-step / 20) for step in range(40)]
    return {
        "name": name,
        "seed": seed,
        "losses": losses,
        "step_s": [0.1] * 40,
        "shaped": shaped,
        "evaluation": {"test_accuracy": 0.8 + seed / 100},
        "replicas_identical": True,
        "settled_after": 12 if name == "gradwire" else 0,
        "compiled": [[3, 4.25]] if name == "gradwire" else [],
    }


def document(**fields):
    spans = [
        {"what": "backward", "unit": "", "start_s": 0.0, "stop_s": 0.1},
        {"what": "wire", "unit": "u1", "start_s": 0.05, "stop_s": 0.3},
    ]
    report = {"recipe": "topk(ratio=0.1)", "why": "CCR > 4 & so on"}
    return {
        "settings": {
            "workload": "resnet_demo",
            "workers": 2,
            "steps": 40,
            "seeds": 2,
            "warmup": 10,
            "delay": "0",
            "rate_bit_per_s": 1.2e8,
            "rate_chosen_here": True,
            "mode": "root",
            "workload_facts": {"parameters": 2_700_000, "data": "Fashion-MNIST", "batch_size": 32},
        },
        "machine": {
            "processor": "a chip <b>",
            "cores": 2,
            "memory_bytes": 8e9,
            "gradwire": "0",
            "torch": "2",
            "python": "3",
            "system": "Linux",
            "date": "today",
        },
        "rows": [row("bound", 0.1), row("peer", 0.4), row("recipe", 0.12, report=report, compress_s=0.01)],
        "courses": [course(name, seed) for seed in (0, 1) for name in ("ddp", "gradwire")],
        "compile_s": 38.0,
        "timelines": {"ddp": spans, "gradwire": spans},
        "checks": [{"claim": "c", "found": "f", "wanted": "w", "passed": None}],
        "notes": ["a note"],
        "seconds": 100.0,
        "failures": [],
    } | fields


class Balanced(html.parser.HTMLParser):
    """Fails on a tag that is closed out of order."""

    VOID = frozenset({"meta", "br", "link"})

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_asks_nobody_for_anything():
    page = render(document())
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert not re.search(r"""src\s*=|href\s*=\s*"(?!data:)|url\(|@import|<script""", page)
    assert page.count('role="img"') == 5


def test_the_page_shows_what_was_chosen_and_among_what():
    considered = {"predicted_step_s": 0.1, "share_of_linear": 0.8, "wire_bytes": 2e6, "late": 0.18}
    choices = [
        {**considered, "recipe": "topk", "late": None, "measured_step_s": None, "verdict": "slower & later"},
        {**considered, "recipe": "int4", "measured_step_s": 0.104, "verdict": "runs"},
    ]
    report = {"recipe": "int4", "why": "why", "choices": choices}
    rows = [row("bound", 0.1), row("peer", 0.4), row("recipe", 0.12, report=report, compress_s=0.01)]
    page = render(document(rows=rows))
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert [page.count(text) for text in ("slower &amp; later", "104.0 ms", 'reason good">runs')] == [1, 1, 1]
    assert "among what" not in render(document())


def bench(**fields):
    settings = document()["settings"] | {"rate": "200mbit", "rounds": 7, "nodes": None, "mode": "root"}
    names = ("bound", "ddp", "topk(ratio=0.01)", "powersgd_hook(bucket_cap_mb=100)")
    kinds = ("bound", "peer", "recipe", "peer")
    more = {"loss": 1.25, "replicas_identical": True, "peak_bytes": 3e8, "failed": None}
    rows = [row(kind, 0.1) | {"name": name} | more for name, kind in zip(names, kinds, strict=True)]
    rows[2] |= {"replicas_identical": False, "report": {"recipe": names[2], "why": "chosen by the user"}}
    rows[3] |= {"failed": "taken to hang", "failure_detail": "line 7"}
    spread = {"ratio": 1.0, "low": 0.98, "high": 1.02}
    return {
        "settings": settings,
        "machine": document()["machine"],
        "rows": rows,
        "spread": spread,
        "format": 1,
    } | fields


def test_a_bench_makes_a_page_too():
    page = render(bench())
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert (
        "<h1>resnet_demo over 200mbit, 2 ranks: topk(ratio=0.01) is 3.00x as fast as plain DDP</h1>" in page
    )
    assert '<td class="number bad">DIFFER</td>' in page
    assert "powersgd_hook(bucket_cap_mb=100) failed: taken to hang" in page
    assert page.count('role="img"') == 2


def test_only_a_recipe_that_chose_is_said_to_have_chosen():
    rows = bench()["rows"]
    assert "<code>topk</code>: chosen by the user" in render(bench(rows=rows))
    rows[2]["report"]["recipe"] = "topk(ratio=0.02, values='full')"
    assert "<code>topk(ratio=0.02)</code>: chosen by the user" in render(bench(rows=rows))
    rows[2]["report"] = {"recipe": "topk(ratio=0.01, values='full')", "why": Composition.why}
    assert 'class="chosen"' not in render(bench(rows=rows))


def test_a_choice_is_named_once_with_what_its_trials_measured():
    report = {
        "recipe": "int4(collective='all_gather')",
        "why": "int4(collective='all_gather'): 126 ms a step",
    }
    rows = [row("bound", 0.1), row("peer", 0.4), row("recipe", 0.12, report=report, compress_s=0.01)]
    page = render(document(rows=rows))
    assert "</code>, by its trials: 126 ms a step." in page
    assert page.count("int4(collective=") == 1


def test_a_step_has_one_length_on_the_page():
    # Parts add up to the row's step here, but medians of parts need not.
    page = render(document(rows=[row("bound", 0.1), row("peer", 0.4), row("recipe", 0.12, forward_s=0.1)]))
    step = page[page.index('id="step"') : page.index('id="inside"')]
    assert re.findall(r'class="name">(\d+\.\d ms)<', step) == ["100.0 ms", "400.0 ms", "120.0 ms"]


def test_claims_keep_their_heads_on_a_phone():
    page = render(document())
    assert '<td data-head="found">f</td><td data-head="wanted">w</td>' in page
    assert "content: attr(data-head)" in page


def test_the_spread_of_the_bound_is_said_in_words():
    assert "The second time it took 0.98 to 1.02 times as long" in render(bench())
    assert "was not measured twice" in render(bench(spread=None))


def test_paper_gets_neither_the_layout_of_a_phone_nor_dark_colours():
    style = re.search(r"<style>(.*?)</style>", render(bench()), re.DOTALL)
    assert style is not None
    narrow_or_dark = re.findall(r"@media ([^{]*(?:max-width|dark)[^{]*) \{", style[1])
    assert len(narrow_or_dark) == 2
    assert all(each.startswith("screen and ") for each in narrow_or_dark)


def test_what_scrolls_can_be_scrolled_by_keys():
    page = render(document()) + render(bench())
    assert re.findall(r'<[^>]*class="(?:scroll|wide)"(?! tabindex="0")[^>]*>', page) == []
    assert page.count('class="scroll" tabindex="0"') == 3


def test_names_have_the_room_that_they_need():
    # In DejaVu Sans, the widest that browsers take for such text, letters of 12 pixels take up to 8.
    rows = bench()["rows"]
    rows[3]["failed"] = None
    [name] = re.findall(r'<text x="0"[^>]*>(powersgd_hook[^<]*)', render(bench(rows=rows)))[:1]
    assert 8 * len(name + "1.01 MB predicted") < WIDTH


def test_the_longest_bar_fits_into_its_picture():
    # A phone shows the whole picture: nothing in it may lie outside, and nothing scrolls.
    picture = stacked(
        [("a", 3.0, [BarPart("wait", 3.0, "wait")]), ("b", 1.0, [BarPart("wait", 1.0, "wait")])], "parts"
    )
    bars = [
        tuple(map(float, bar))
        for bar in re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', picture)
    ]
    assert bars == [(0.0, WIDTH), (0.0, round(WIDTH / 3, 2))]
    assert 'class="wide"' not in render(document())


def test_a_setting_that_failed_has_no_bars():
    assert ">powersgd_hook(bucket_cap_mb=100)</text>" not in render(bench())


@pytest.mark.parametrize("given", [document(), bench()], ids=["demo", "bench"])
def test_a_page_holds_its_numbers(given):
    [data] = re.findall(r'href="data:application/json;base64,([^"]*)"', render(given))
    assert json.loads(base64.b64decode(data)) == given


def test_what_is_neither_makes_no_page():
    with pytest.raises(ValueError, match="not the JSON of"):
        render({"format": 1, "facts": {}})


def test_the_command_makes_a_page_beside_the_document(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(bench()), encoding="utf-8")
    done = CliRunner().invoke(app, ["report", str(path)])
    assert done.exit_code == 0, done.output
    assert "is 3.00x as fast" in (tmp_path / "bench.html").read_text(encoding="utf-8")
    path.write_text("{}", encoding="utf-8")
    assert CliRunner().invoke(app, ["report", str(path)]).exit_code == 2


def luminance(colour):
    # Relative luminance by WCAG 2.2, from a colour #rrggbb.
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_colours_can_be_told_from_what_is_behind_them(theme):
    # WCAG 2.2: 4.5:1 for text, 3:1 for marks.
    light, dark, paper = (
        dict(re.findall(r"--(\w+): (#\w{6});", block))
        for block in re.findall(r":root \{(.*?)\}", render(document()), re.DOTALL)
    )
    colours = light | {"light": {}, "dark": dark, "print": paper}[theme]

    def contrast(one, other):
        low, high = sorted((luminance(colours[one]), luminance(colours[other])))
        return (high + 0.05) / (low + 0.05)

    texts, backgrounds, lines = ("ink", "soft", "good", "bad", "gradwire"), ("page", "card"), ("rule", "grid")
    bars = ("data", "forward", "backward", "wait", "optimizer")
    marks = ("ddp", "gradwire", "bound", "encode", "decode", "wire", *bars)
    assert set(colours) == {*texts, *backgrounds, *lines, *marks, "inside"}, "each colour has a purpose"
    assert set(dark) == set(light)
    assert min(contrast(ink, card) for ink in texts for card in backgrounds) >= 4.5
    assert min(contrast("inside", bar) for bar in bars) >= 4.5
    assert min(contrast(mark, "card") for mark in marks) >= 3.0


def test_words_from_outside_are_escaped():
    page = render(document())
    assert "a chip &lt;b&gt;" in page
    assert "CCR &gt; 4 &amp; so on" in page


def test_the_fallback_is_said_aloud():
    settings = document()["settings"] | {"mode": "backend"}
    page = render(document(settings=settings))
    assert "the link was not shaped" in page
    assert "NO SHAPED LINK" in page


def test_a_failure_shows_its_traceback():
    page = render(document(failures=[{"name": "auto", "reason": "taken to hang", "detail": "line 7"}]))
    assert "auto failed: taken to hang" in page
    assert "line 7" in page


def test_a_run_that_broke_off_still_makes_a_page():
    nothing = row("recipe", 1.0) | {"step_s": None, "speedup_over_ddp": None, "scaling": None}
    page = render(document(rows=[row("bound", 0.1), row("peer", 0.4), nothing], courses=[], timelines={}))
    assert "did not finish" in page
    assert "nothing was measured" in page
    assert "nothing was recorded" in page


def test_projected_steps_are_dashed_and_explained():
    page = render(document())
    assert "curve dashed ddp" in page
    assert "Dashed: steps that ran on an unshaped link" in page
    # All steps of the seed that ran on the slow link did; those of the other have its times.
    whole = [course("ddp", 0, shaped=40), course("ddp", 1, shaped=0), course("gradwire", 0, shaped=40)]
    assert "Dashed" not in render(document(courses=whole))


def test_the_projection_uses_the_median_after_the_warm_up():
    ddp = Course("ddp", 0, [1.0] * 7, [9.0, 9.0, 1.0, 3.0, 2.0, 0.5, 0.5], shaped=5)
    assert on_slow_link(ddp, 2) == [9.0, 9.0, 1.0, 3.0, 2.0, 2.0, 2.0]
    other = Course("ddp", 1, [1.0] * 6, [0.5] * 6)
    assert on_slow_link(other, 2, ddp) == [9.0, 9.0, 1.0, 3.0, 2.0, 2.0]


def test_seeds_are_bands_and_marks_say_where_kernels_compile_and_auto_has_chosen():
    page = render(document())
    # Both sides, in both charts; one seed has no range.
    assert [page.count(f'class="band fill-{name}"') for name in ("ddp", "gradwire")] == [2, 2]
    assert 'class="band' not in render(document(courses=[course("ddp", 0), course("gradwire", 0)]))
    assert page.count("recipe has chosen, step 12") == 2
    assert page.count("kernels compiled: 4.25 s") == 2
    assert "Before the race, kernels were compiled for 38.00 s." in page
    assert "All kernels had been compiled before." in render(document(compile_s=0.1))


def test_a_curve_shows_what_a_link_that_costs_nothing_would_give():
    [points] = re.findall(r'points="([^"]+)" class="curve bound"', render(document()))
    [ddp] = re.findall(r'points="([^"]+)" class="curve ddp"', render(document()))[:1]
    # 40 steps of 0.1 s, where plain DDP takes as long; both are equal here.
    assert points.split()[0] == ddp.split()[0]
    rows = [row("bound", 0.05), row("peer", 0.1), row("recipe", 0.1)]
    [faster] = re.findall(r'points="([^"]+)" class="curve bound"', render(document(rows=rows)))
    last = [float(each.split()[-1].split(",")[0]) for each in (points, faster)]
    assert last[1] < last[0]


def test_a_mark_has_its_words_where_there_is_room():
    points = tuple((float(step), 1.0) for step in range(101))
    picture = line_chart(
        [Series(points, "ddp")], "steps", "loss", marks=[Mark(10, "early"), Mark(90, "late")]
    )
    anchors = dict(re.findall(r'text-anchor="(\w+)" class="label">(early|late)<', picture))
    assert anchors == {"start": "early", "end": "late"}


def dots(picture):
    """Class and centre of each dot, in their order."""
    found = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="[\d.]+" class="fill-(\w+)"', picture)
    return [(name, float(x), float(y)) for x, y, name in found]


def test_a_dot_on_each_curve_says_when_it_has_plain_ddps_final_loss():
    # 40 steps of 0.1 s with falling losses, so the last step of all is the first that is low enough.
    picture = loss_over_time(document())
    assert re.findall(r">([^<>]*: 4.0 s)<", picture) == ["gradwire: 4.0 s", "plain DDP: 4.0 s"]
    assert [name for name, _, _ in dots(picture)] == ["gradwire", "ddp"]
    for name, x, y in dots(picture):
        [points] = re.findall(rf'points="([^"]+)" class="curve dashed {name}"', picture)
        assert (x, y) == pytest.approx(tuple(map(float, points.split()[-1].split(","))), abs=0.1)
    worse = [course("gradwire", 1) | {"losses": [2.3] * 40}, course("gradwire", 0), course("ddp", 0)]
    assert re.findall(r">([^<>]*: 4.0 s)<", loss_over_time(document(courses=worse))) == ["plain DDP: 4.0 s"]


@pytest.mark.parametrize("height", [1.0, 0.01])
def test_words_at_dots_lie_inside_the_picture_and_not_over_each_other(height):
    points = tuple((float(step), 1.0) for step in range(101))
    spots = [Spot(50.0, height, "one", "gradwire"), Spot(100.0, height, "two", "ddp")]
    picture = line_chart([Series(points, "ddp")], "seconds", "loss", spots=spots, width=WIDE)
    assert 'viewBox="0 0 760 ' in picture
    places = re.findall(
        r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)" class="name">(?:one|two)<', picture
    )
    assert [anchor for _, _, anchor in places] == ["start", "end"]
    (_, first, _), (_, second, _) = places
    assert abs(float(first) - float(second)) >= 12, "letters of 12 pixels"
    [axis] = re.findall(r'y1="([\d.]+)"[^>]* class="axis"', picture)
    assert max(float(first), float(second)) < float(axis)


def test_a_legend_has_as_many_entries_on_a_line_as_fit():
    def lines(width):
        entries = [("ddp", "plain DDP"), ("gradwire", "gradwire"), ("bound", "no communication")]
        text = svg.alone(svg.drawing(width, 100, [], "picture"), entries, "")
        return len(set(re.findall(r'<rect x="[\d.]+" y="([\d.]+)" width="12"', text)))

    assert [lines(width) for width in (1000.0, 230.0, 100.0)] == [1, 2, 3]


def test_a_picture_is_a_file_of_its_own():
    text = file_of(loss_over_time(document()), TIMES_LEGEND)
    assert not re.search(r"url\(|@import|<script|href", text)
    root = ElementTree.fromstring(text)
    assert root.attrib["aria-label"] == "training loss against seconds of training on the slow link"
    assert [words for _, words in TIMES_LEGEND if f">{words.replace(chr(39), '&#x27;')}<" not in text] == []
    coloured = {f"fill-{name}" for name, _ in TIMES_LEGEND} | {f"curve.{name}" for name, _ in TIMES_LEGEND}
    assert [name for name in coloured if f".{name} {{" not in text] == []
    with pytest.raises(ValueError, match="not a drawing"):
        file_of("<svg></svg>")


def test_a_lane_says_how_long_it_was_busy_and_not_the_sum_of_its_bars():
    spans = [{"what": "wire", "unit": f"u{k}", "start_s": 0.1 * k, "stop_s": 0.1 * k + 0.2} for k in range(3)]
    assert "on the wire: 400.0 ms" in render(document(timelines={"ddp": spans}))


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 237.0), (-3.0, 1e-3), (0.0, 7e-6)])
def test_ticks_are_round_and_inside(low, high):
    values = svg.ticks(low, high)
    assert 3 <= len(values) <= 11
    assert all(low - 1e-12 <= value <= high + 1e-12 for value in values)


def test_ticks_of_an_empty_range():
    assert svg.ticks(2.0, 2.0) == [2.0]


def test_smoothing_skips_what_is_not_known():
    assert smooth([1.0, None, 3.0], window=2) == [1.0, 1.0, 3.0]


def test_a_loss_that_diverges_stays_at_its_step_and_leaves_the_picture():
    found = smooth([1.0, None, None, 2.0], window=2)
    assert found[:2] == [1.0, 1.0]
    assert math.isnan(found[2])
    assert found[3] == 2.0
    points = tuple(enumerate(found))
    assert "nan" not in line_chart([Series(points, "ddp")], "steps", "loss")


def test_thinning_keeps_the_last_point():
    points = thin([(float(index), 0.0) for index in range(1000)], most=100)
    assert len(points) <= 102
    assert points[-1] == (999.0, 0.0)


def test_a_spike_does_not_flatten_the_chart():
    points = tuple((float(step), 1e9 if step == 50 else 1.0) for step in range(100))
    picture = line_chart([Series(points, "ddp")], "steps", "loss")
    heights = [float(pair.split(",")[1]) for pair in re.search(r'points="([^"]+)"', picture)[1].split()]
    assert min(heights) >= 0
    assert len({round(height) for height in heights}) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (seconds_text(0.0421), "42.1 ms"),
        (seconds_text(2.2), "2.20 s"),
        (seconds_text(231.0), "231 s"),
        (bytes_text(44.7e6), "44.7 MB"),
        (bytes_text(0), "0 B"),
        (ratio_text(0.934, percent=True), "93.4 %"),
        (ratio_text(None), "-"),
    ],
)
def test_numbers_carry_units(text, expected):
    assert text == expected
