"""The choice of the fastest way to compute: with a clock of our own, and no assertion on what
anything took."""

import json
import logging
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedexp.core.errors import ConfigError
from fedexp.engine import timed
from fedexp.engine.hardware import Hardware
from fedexp.engine.timed import Way
from fedexp.models.cnn import CNN
from fedexp.models.winograd import Conv2d
from fedexp.rundir import files, origin
from fedexp.training import fastest, resuming
from toy_federation import HARDWARE, make_simulation

WINOGRAD, DIRECT, BF16 = Way("fp32", "winograd"), Way("fp32", "direct"), Way("bf16", "direct")
QUESTION = {"machine": "a", "inputs": [5, 3, 8, 8]}
# on 32 x 32 pixels the second convolution saves
DEEP = CNN(channels=(40, 40), kernel=3, padding=1, hidden=(4,))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedexp" / "ways"


class Clock:
    """Time that passes only in steps: each way takes its seconds, a warm-up ten times as long."""

    def __init__(self, **seconds):
        self.seconds, self.now, self.calls = seconds, 0.0, []

    def __call__(self):
        return self.now

    def step_of(self, way):
        name = f"{way.precision}_{way.convolution}"

        def step():
            warm = name in self.calls
            self.calls.append(name)
            self.now += self.seconds[name] * (1 if warm else 10)

        return step


def ask(clock, ways=(WINOGRAD, DIRECT), question=QUESTION):
    return timed.fastest(ways, question, clock.step_of, clock)


@pytest.mark.parametrize(
    ("winograd", "direct", "way"), [(0.034, 0.031, DIRECT), (0.025, 0.031, WINOGRAD)]
)
def test_the_fastest_is_taken_and_noted(winograd, direct, way, cache):
    clock = Clock(fp32_winograd=winograd, fp32_direct=direct)
    found = ask(clock)
    assert (found.way, found.decided) == (way, ("convolution",))
    assert found.seconds == pytest.approx({"fp32 winograd": winograd, "fp32 direct": direct})
    assert clock.calls == ["fp32_winograd", "fp32_direct"] * (1 + timed.STEPS)  # in turn
    again = Clock()  # which knows no way
    assert ask(again) == found
    assert not again.calls
    (file,) = cache.glob("*.json")
    assert json.loads(file.read_text())["question"] == QUESTION | {
        "ways": ["fp32 winograd", "fp32 direct"]
    }


def test_the_fastest_step_counts():
    """Of steps of 5, 2 and 9 s here and 3, 4 and 4 s there, after the warm-up."""
    now, left = [0.0], {"a": [7, 5, 2, 9], "b": [1, 3, 4, 4]}

    def step_of(name):
        return lambda: now.__setitem__(0, now[0] + left[name].pop(0))

    assert timed.measure({name: step_of(name) for name in left}, lambda: now[0]) == {"a": 2, "b": 3}


def test_another_question_is_measured(cache):
    ask(Clock(fp32_winograd=1, fp32_direct=2))
    other = Clock(fp32_winograd=2, fp32_direct=1)
    assert ask(other, question=QUESTION | {"inputs": [6, 3, 8, 8]}).way == DIRECT
    third = Clock(fp32_winograd=3, fp32_direct=2, bf16_direct=1)
    found = ask(third, (WINOGRAD, DIRECT, BF16))
    assert (found.way, found.decided) == (BF16, ("precision", "convolution"))
    assert len(list(cache.glob("*.json"))) == 3


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", '{"seconds": {"fp32 winograd": 1}}', "[" * 100_000),
        lambda whole: whole | {"question": {}},
        lambda whole: whole | {"seconds": {"fp32 winograd": 1.0}},
        lambda whole: whole | {"seconds": {"fp32 winograd": "x", "fp32 direct": 1.0}},
        lambda whole: whole | {"seconds": {"fp32 winograd": 0.0, "fp32 direct": 1.0}},
        lambda whole: whole | {"seconds": {"fp32 winograd": float("nan"), "fp32 direct": 1.0}},
    ],
)
def test_a_damaged_note_is_measured_anew(content, cache):
    ask(Clock(fp32_winograd=1, fp32_direct=2))
    (file,) = cache.glob("*.json")
    whole = json.loads(file.read_text())
    file.write_text(content if isinstance(content, str) else json.dumps(content(whole)))
    clock = Clock(fp32_winograd=2, fp32_direct=1)
    assert ask(clock).way == DIRECT
    assert clock.calls
    assert ask(Clock()).way == DIRECT


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        clock = Clock(fp32_winograd=2, fp32_direct=1)
        assert ask(clock).way == DIRECT
        assert clock.calls


def test_where_notes_lie(tmp_path, monkeypatch):
    assert timed.folder() == tmp_path / "cache" / "fedexp" / "ways"
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert timed.folder() == tmp_path / ".cache" / "fedexp" / "ways"


def test_one_of_several_at_once_measures():
    """Three, with steps of a hundredth of a second: two find what the third has noted. The lock is
    one of files, which stops threads as it does processes."""
    steps = []

    def step_of(way):
        return lambda: (steps.append(way), time.sleep(0.01))

    with ThreadPoolExecutor(3) as pool:
        asked = [
            pool.submit(timed.fastest, [WINOGRAD, DIRECT], {"machine": "a"}, step_of)
            for _ in range(3)
        ]
        answers = [each.result() for each in asked]
    assert len(steps) == 2 * (1 + timed.STEPS)
    assert len({answer.way for answer in answers}) == 1


@pytest.mark.slow  # three processes import torch
def test_one_of_several_processes_measures(tmp_path):
    """Three at once, with steps of a tenth of a second: two find what the third has noted."""
    code = textwrap.dedent("""
        import time
        from fedexp.engine import timed
        ways = [timed.Way("fp32", "winograd"), timed.Way("fp32", "direct")]
        steps = []
        def step_of(way):
            return lambda: (steps.append(1), time.sleep(0.1))
        timed.fastest(ways, {"machine": "a"}, step_of)
        print(len(steps))
    """)
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    counts = sorted(int(process.communicate(timeout=100)[0]) for process in processes)
    assert counts == [0, 0, 2 * (1 + timed.STEPS)]


# --- which ways there are


def resolved(**changes):
    return Hardware(**HARDWARE | {"engine": "sequential"} | changes).resolve(
        vectorises=True, cohort_size=4
    )


@pytest.mark.parametrize(
    ("changes", "ways"),
    [
        ({}, [WINOGRAD, DIRECT]),
        ({"engine": "workers"}, [WINOGRAD, DIRECT]),
        ({"convolution": "direct"}, [DIRECT]),
        ({"convolution": "winograd"}, [WINOGRAD]),
        ({"precision": "auto"}, [WINOGRAD, DIRECT, BF16]),
        ({"precision": "auto", "convolution": "direct"}, [DIRECT, BF16]),
        ({"precision": "auto", "convolution": "winograd"}, [WINOGRAD]),
        ({"precision": "bf16"}, [BF16]),
        ({"precision": "fp64"}, [Way("fp64", "direct")]),
        ({"engine": "vectorised"}, [DIRECT]),
        ({"engine": "vectorised", "precision": "auto"}, [DIRECT, BF16]),
    ],
    ids=str,
)
def test_ways_to_choose_from(changes, ways, monkeypatch):
    monkeypatch.setattr("fedexp.engine.hardware.trouble_with_bf16", lambda: None)
    assert resolved(**changes).ways == ways


def test_bf16_is_no_choice_on_cpus_without_it(monkeypatch, caplog):
    monkeypatch.setattr("fedexp.engine.hardware.trouble_with_bf16", lambda: "many times slower")
    assert resolved(precision="auto").ways == [WINOGRAD, DIRECT]
    assert not caplog.records


def test_precision_must_be_known():
    with pytest.raises(ConfigError, match=r"hardware.precision=fast: must be one of auto, fp32"):
        resolved(precision="fast")


# --- in a run


@pytest.fixture
def found(monkeypatch):
    """Seconds of each way by name; what is asked is appended to `asked`."""
    seconds = {"fp32 winograd": 3.0, "fp32 direct": 2.0, "bf16 direct": 1.0}
    monkeypatch.setattr("fedexp.engine.hardware.trouble_with_bf16", lambda: None)
    monkeypatch.setattr(
        timed, "measure", lambda steps, clock: {name: seconds[name] for name in steps}
    )
    return seconds


def choose(before=None, model=DEEP, size=32, **changes):
    data = make_simulation().bench.data
    data = replace(data, x_train=torch.zeros(12, size, size, 1, dtype=torch.uint8))
    module = model.build((1, size, size), 4).to(memory_format=torch.channels_last)
    return fastest.with_fastest_way(resolved(**changes), module, data, 12, before)


def test_the_choice_and_what_the_summary_says(found, caplog):
    with caplog.at_level(logging.INFO, "fedexp"):
        chosen = choose()
    assert chosen.convolves == "direct"
    assert chosen.as_dict()["seconds_of_a_step"] == {"fp32 winograd": 3.0, "fp32 direct": 2.0}
    assert caplog.messages == [
        "timed, a step of 12 examples: fp32 winograd 3000.0 ms, fp32 direct 2000.0 ms; taking fp32"
        " direct"
    ]
    decisive = chosen.arithmetic()
    assert (decisive["convolution"], decisive["by_timing"]) == ("direct", ["convolution"])
    assert "seconds_of_a_step" not in decisive
    found["fp32 winograd"] = 1.0
    assert choose().convolves == "direct"  # as it was noted
    assert choose(threads=3).convolves == "winograd"  # another question


def test_the_precision(found):
    chosen = choose(precision="auto")
    assert (chosen.precision, chosen.convolves) == ("bf16", "direct")
    assert chosen.arithmetic()["by_timing"] == ["precision", "convolution"]
    found["bf16 direct"] = 4.0
    assert choose(precision="auto", threads=3).precision == "fp32"


def test_a_named_way_is_not_timed(monkeypatch):
    monkeypatch.setattr(timed, "fastest", lambda *_: pytest.fail("timed"))
    for changes in ({"convolution": "direct"}, {"convolution": "winograd"}, {"precision": "fp64"}):
        chosen = choose(**changes)
        assert chosen.as_dict().keys() & {"by_timing", "seconds_of_a_step"} == set()
    # nothing saves multiplications
    chosen = choose(model=CNN(channels=(3,), kernel=3, padding=1, hidden=(8,)), size=6)
    assert chosen.measured is None


def test_a_resumed_run_keeps_its_way(found):
    new = choose()
    assert (new.convolves, fastest.way_of(new)) == (
        "direct",
        {"precision": "fp32", "convolution": "direct"},
    )
    kept = choose({"precision": "fp32", "convolution": "winograd"})
    assert (kept.convolves, kept.measured.seconds) == ("winograd", {})
    # one span of rounds, no two
    assert kept.arithmetic()["by_timing"] == new.arithmetic()["by_timing"]
    assert (
        choose({"precision": "bf16", "convolution": "direct"}, precision="auto").precision == "bf16"
    )
    # begun on a GPU
    assert choose({"precision": "tf32", "convolution": "streams"}).convolves == "direct"
    found["bf16 direct"] = 0.5
    other = choose({"precision": "fp32", "convolution": "streams"}, precision="auto")
    assert (other.precision, other.measured.seconds) == ("fp32", {})
    former = choose({})  # begun before the way was noted
    assert former.measured is None


def test_a_run_directory_notes_the_way(tmp_path):
    data = make_simulation().bench.data
    origin.note(tmp_path, {}, data, {"precision": "fp32", "convolution": "direct"})
    assert origin.mapping_of(origin.read(tmp_path), "way") == {
        "precision": "fp32",
        "convolution": "direct",
    }


def test_a_run_that_ended_before_its_first_state_chooses_as_a_new_one(tmp_path, found):
    """Nothing was noted when it was killed. It must end as a run that was not: with the way that
    timing chooses."""
    assert resuming.way_before(tmp_path) is None
    assert choose(resuming.way_before(tmp_path)).convolves == choose().convolves == "direct"
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / files.CHECKPOINT).touch()
    assert resuming.way_before(tmp_path) == {}  # of a version that did not note it
    origin.note(
        tmp_path, {}, make_simulation().bench.data, {"precision": "fp32", "convolution": "winograd"}
    )
    assert choose(resuming.way_before(tmp_path)).convolves == "winograd"


# --- the steps


def test_steps_are_steps_of_the_way(monkeypatch):
    """Each way trains a copy: the model stays, and only Winograd's way calls it."""
    module, x = DEEP.build((1, 32, 32), 4), torch.randn(12, 1, 32, 32)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    called = []
    monkeypatch.setattr(
        "fedexp.models.winograd.conv2d",
        lambda x, *rest: called.append(1) or nn.functional.conv2d(x, *rest[:2], 1, rest[2]),
    )
    for way, count in ((DIRECT, 0), (BF16, 0), (WINOGRAD, 1)):
        called.clear()
        timed.training_step(module, way, x)()
        assert len(called) == count
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    assert not any(isinstance(part, Conv2d) for part in module.modules())


def test_where_a_layer_saves_multiplications():
    assert timed.winograd_pays(DEEP.build((1, 32, 32), 4), torch.zeros(12, 1, 32, 32))
    assert not timed.winograd_pays(DEEP.build((1, 4, 4), 4), torch.zeros(12, 1, 4, 4))
    assert not timed.winograd_pays(nn.Linear(3, 4), torch.zeros(12, 3))


def test_a_real_measurement():
    """With the real clock: one of the ways, whichever."""
    chosen = choose()
    assert chosen.convolves in ("winograd", "direct")
    assert set(chosen.measured.seconds) == {"fp32 winograd", "fp32 direct"}
