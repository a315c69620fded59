"""Mixed clients beside random faults, in short; `scripts/chaos` is the long form."""

from __future__ import annotations

import signal

import pytest

from tests.machine import wait_until
from tests.served import Server
from tests.system.chaos import MB, Ask, Chaos, memory, outgrown, serving
from tests.system.container import ROOT, Answer

SECONDS = 15.0
STREAM = Ask("lmi stream", "/invocations", b"{}")
WHOLE = Ask("lmi", "/invocations", b"{}")
LINES = Ask("lines", "/invocations", b"{}")
RIGHT = b'{"token": "a"}\n{"token": "b"}\n'
ERROR = b'{"error": "the engine was lost", "code": 503}\n'
LATER = {"retry-after": "1"}


@pytest.mark.parametrize(
    ("end", "ask", "answer"),
    [
        ("whole", STREAM, Answer(200, {}, RIGHT)),
        ("error", STREAM, Answer(200, {}, RIGHT[:15] + ERROR)),
        ("error", LINES, Answer(200, {}, RIGHT[:15] + ERROR)),
        ("refused", WHOLE, Answer(503, LATER, ERROR)),
        ("broken", STREAM, Answer(200, {}, RIGHT.replace(b"b", b"c"))),
        ("broken", STREAM, Answer(200, {}, RIGHT[:15])),
        ("broken", STREAM, Answer(200, {}, RIGHT[:15].replace(b"a", b"c") + ERROR)),
        ("broken", STREAM, Answer(200, {}, RIGHT[:20], is_whole=False)),
        ("broken", LINES, Answer(200, {}, RIGHT[:15])),
        ("broken", LINES, Answer(200, {}, b'{"token": "c"}\n' + ERROR)),
        ("broken", WHOLE, Answer(200, {}, RIGHT[:15] + ERROR)),
        ("broken", WHOLE, Answer(503, {}, ERROR)),
        ("broken", WHOLE, Answer(500, LATER, ERROR)),
    ],
)
def test_the_driver_sees_an_answer_that_no_fault_excuses(
    end: str, ask: Ask, answer: Answer
) -> None:
    chaos = Chaos(Server(ROOT, ROOT), num_clients=0, expected={ask: (200, RIGHT.splitlines())})
    assert chaos.end_of(ask, answer, began_s=1.0).partition(":")[0] == end


def test_the_driver_excuses_a_cut_by_the_death_of_a_front_end_only() -> None:
    chaos = Chaos(
        Server(ROOT, ROOT), 0, expected={STREAM: (200, RIGHT.splitlines())}, cuts=[[2.0, 3.0]]
    )
    cut = Answer(200, {}, RIGHT[:20], is_whole=False)

    assert chaos.end_of(STREAM, cut, began_s=2.5) == "cut"
    assert chaos.end_of(STREAM, cut, began_s=3.5).startswith("broken")

    foreign = Answer(200, {}, RIGHT[:20].replace(b"a", b"c"), is_whole=False)
    assert chaos.end_of(STREAM, foreign, began_s=2.5).startswith("broken")


def test_the_driver_sees_a_process_that_grows() -> None:
    before = {
        1: ("lmi-front-0", 90 * MB),
        2: ("lmi-engine-0", 400 * MB),
        3: ("lmi-engine-0", 500 * MB),
    }

    assert not outgrown(
        before,
        {1: ("lmi-front-0", 150 * MB), 4: ("lmi-engine-0", 600 * MB), 5: ("lmi-guides", 900 * MB)},
    )

    [message] = outgrown(before, {1: ("lmi-front-0", 1000 * MB), 2: ("lmi-engine-0", 450 * MB)})
    assert message == "lmi-front-0 grew by 910 MB to 1000 MB"
    assert (
        len(outgrown(before, {2: ("lmi-engine-0", 700 * MB), 4: ("lmi-engine-0", 700 * MB)})) == 2
    )


def test_whatever_is_struck_each_request_ends_once_and_whole_answers_are_right() -> None:
    with serving() as server:
        chaos = Chaos(server, num_clients=8, seed=3)
        chaos.learn()
        before = memory(server)
        chaos.run(SECONDS)

        assert not chaos.broken
        assert chaos.ends["whole"] > 0 and sum(chaos.struck.values()) > 0, (
            chaos.ends,
            chaos.struck,
        )

        wait_until(server.is_idle, "no request and no block of the cache is held")
        assert not outgrown(before, memory(server))
        assert "Traceback" not in server.log.read_text()

        server.signal(signal.SIGTERM)
        assert server.wait() == 0

        wait_until(lambda: not server.pids(), "no process is left")
