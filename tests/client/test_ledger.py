"""The ledger: durable before it returns, immutable, and never above the budget."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.client.ledger import (
    LEDGER_FILE,
    AlreadyReleased,
    BudgetExceeded,
    Ledger,
    Release,
    Session,
    find_ledgers,
)
from coterie.errors import CoterieError
from coterie.mechanisms.accounting import pure_loss
from coterie.mechanisms.events import Neighbourhood, Noise, SelectionRelease, UpdateRelease

TABLES = ("sessions", "releases", "noises", "disclosures", "refusals")


def a_release(
    number: int,
    *,
    run: str = "run",
    sizes: tuple[int, ...] = (11,),
    noise_multiplier: float = 3.0,
    radius: float = 0.37,
    selection: SelectionRelease | None = None,
) -> Release:
    noises = tuple(Noise(size, size / (noise_multiplier * radius), radius) for size in sizes)
    return Release(
        id=f"{run}/{number}",
        time=1e9 + number,
        run=run,
        round=number,
        hypothesis=number % 3,
        index_sent=number % 2 == 0,
        rows_sent=number % 3 == 0,
        layer_names=tuple(f"layer{j}" for j in range(len(sizes))),
        update=UpdateRelease(Neighbourhood.FIXED, noises),
        selection=selection,
    )


def fill(path: Path, count: int, **changes: object) -> None:
    with Ledger(path, create=True) as ledger:
        for number in range(1, count + 1):
            ledger.record_release(a_release(number, **changes), budget=1e9)  # type: ignore[arg-type]


def releases_in(path: Path) -> list[Release]:
    with Ledger(path, create=False) as ledger:
        return ledger.releases()


def run_child(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with this file's helpers at hand."""
    head = f"import runpy, sys; g = runpy.run_path({__file__!r}); globals().update(g)\n"
    command = [sys.executable, "-c", head + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / LEDGER_FILE


def test_release_is_visible_to_another_connection_when_the_call_returns(path: Path) -> None:
    with Ledger(path, create=True) as ledger:
        ledger.record_release(a_release(1, sizes=(9, 4)), budget=100)
        with sqlite3.connect(path) as other:
            assert other.execute("SELECT run, round FROM releases").fetchall() == [("run", 1)]
            assert other.execute("SELECT count(*) FROM noises").fetchone() == (2,)
        assert not path.with_name(path.name + "-journal").exists()


def test_every_commit_is_synced_with_its_folder(path: Path) -> None:
    # A kill cannot show a missing fsync, as the kernel keeps the pages: the settings are the only witness.
    with Ledger(path, create=True) as ledger:
        assert ledger._connection.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA
        assert ledger._connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_release_survives_a_kill_right_after_the_call(path: Path) -> None:
    done = run_child(
        "ledger = Ledger(Path(sys.argv[1]), create=True)\n"
        "ledger.record_release(a_release(1), budget=100)\n"
        "os.kill(os.getpid(), signal.SIGKILL)",
        path,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert releases_in(path) == [a_release(1)]


@pytest.mark.parametrize("reopen", [True, False], ids=["client", "reader"])
def test_kill_in_mid_transaction_leaves_a_readable_ledger_without_the_row(path: Path, reopen: bool) -> None:
    fill(path, 1)
    done = run_child(
        "ledger = Ledger(Path(sys.argv[1]), create=True)\n"
        "connection = ledger._connection\n"
        "connection.execute('PRAGMA cache_size = 1')\n"  # half the transaction is in the file when the kill comes
        "connection.execute('BEGIN IMMEDIATE')\n"
        "for number in range(2, 400):\n"
        "    connection.execute(\"INSERT INTO refusals VALUES (0, 'r', ?, ?)\", (number, 'x' * 500))\n"
        "connection.execute(\"INSERT INTO releases SELECT 'b', time, run, 2, 0, 0, 0, neighbourhood, NULL, NULL, \"\n"
        '                   "NULL FROM releases")\n'
        "os.kill(os.getpid(), signal.SIGKILL)",
        path,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert path.with_name(path.name + "-journal").stat().st_size > 512  # else the kill came too early to test anything
    with Ledger(path, create=reopen) as ledger:
        assert ledger.releases() == [a_release(1)]
        assert ledger.refusals() == []


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("statement", ["DELETE FROM {}", "UPDATE {} SET rowid = rowid + 100"])
def test_rows_are_immutable(path: Path, table: str, statement: str) -> None:
    with Ledger(path, create=True) as ledger:
        ledger.record_session(Session("c", "t", "f", 1.0, 1e-5, 3.0))
        ledger.record_release(a_release(1), budget=100)
        ledger.record_disclosure("run", 1, "loss")
        ledger.record_refusal("run", 1, "no")
    with sqlite3.connect(path) as other, pytest.raises(sqlite3.Error, match="immutable"):
        other.execute(statement.format(table))


@pytest.mark.parametrize("table", ["releases", "noises", "disclosures"])
def test_a_row_is_not_replaced_either(path: Path, table: str) -> None:
    """REPLACE deletes the old row without meeting a DELETE trigger."""
    with Ledger(path, create=True) as ledger:
        ledger.record_release(a_release(1), budget=100)
        ledger.record_disclosure("run", 1, "loss")
    with sqlite3.connect(path) as other, pytest.raises(sqlite3.Error, match="immutable"):
        other.execute(f"INSERT OR REPLACE INTO {table} SELECT * FROM {table}")


def test_second_release_in_a_round_is_refused(path: Path) -> None:
    with Ledger(path, create=True) as ledger:
        ledger.record_release(a_release(1), budget=100)
        with pytest.raises(AlreadyReleased, match="round 1 of run run"):
            ledger.record_release(a_release(1), budget=100)
        assert len(ledger.releases()) == 1
        ledger.record_release(a_release(1, run="other run"), budget=100)
        ledger.record_release(a_release(2), budget=100)
        assert len(ledger.releases()) == 3


@pytest.mark.parametrize(
    ("sizes", "noise_multiplier", "times", "budget"),
    [((11,), 3.0, 6, 22.0), ((6, 5), 3.0, 6, 22.0), ((7,), 0.7, 10, 100.0), ((320, 18496), 0.1, 3, 564480.0)],
)
def test_budget_is_reachable_exactly(
    path: Path, sizes: tuple[int, ...], noise_multiplier: float, times: int, budget: float
) -> None:
    # Without the rounding tolerance the last one is refused; with a tolerance of a whole release one more passes.
    made = [a_release(t, sizes=sizes, noise_multiplier=noise_multiplier) for t in range(1, times + 2)]
    with Ledger(path, create=True) as ledger:
        for release in made[:-1]:
            ledger.record_release(release, budget=budget)
        with pytest.raises(BudgetExceeded, match="budget"):
            ledger.record_release(made[-1], budget=budget)
        with pytest.raises(BudgetExceeded):
            ledger.check("run", times + 1, planned=1e-9 * budget, budget=budget)
        assert len(ledger.releases()) == times
        assert pure_loss(ledger.events()) == pytest.approx(budget, rel=1e-12)


def test_another_run_goes_on_from_the_same_total(path: Path) -> None:
    fill(path, 4)
    with Ledger(path, create=True) as ledger:
        ledger.record_release(a_release(1, run="second"), budget=22)
        ledger.record_release(a_release(2, run="second"), budget=22)
        with pytest.raises(BudgetExceeded):
            ledger.record_release(a_release(3, run="second"), budget=22)


def test_two_connections_cannot_both_spend_the_last_of_the_budget(path: Path) -> None:
    with Ledger(path, create=True) as first, Ledger(path, create=True) as second:
        first.check("run", 1, planned=11 / 3, budget=4)
        second.check("run", 2, planned=11 / 3, budget=4)
        first.record_release(a_release(1), budget=4)
        with pytest.raises(BudgetExceeded):
            second.record_release(a_release(2), budget=4)


def test_selection_is_charged(path: Path) -> None:
    chosen = SelectionRelease("randomized-argmin", 3, 0.5)
    with Ledger(path, create=True) as ledger:
        with pytest.raises(BudgetExceeded):
            ledger.record_release(a_release(1, selection=chosen), budget=11 / 3 + 0.49)
        ledger.record_release(a_release(1, selection=chosen), budget=11 / 3 + 0.5)
        assert pure_loss(ledger.events()) == pytest.approx(11 / 3 + 0.5)


def test_rows_come_back_as_they_went_in_oldest_first(path: Path) -> None:
    chosen = SelectionRelease("exponential", 3, 0.25)
    releases = [a_release(3, sizes=(9, 4), selection=chosen), a_release(1, run="b"), a_release(2, sizes=(1, 2, 3))]
    session = Session("ward", "tiny", "abc", 5.0, 1e-6, 3.5)
    began = time.time()
    with Ledger(path, create=True) as ledger:
        for release in releases:
            ledger.record_release(release, budget=100)
        ledger.record_session(Session("ward", "tiny", "abc", 4.0, 1e-6, 3.5))
        ledger.record_session(session)
        ledger.record_refusal("run", 4, "why")
        ledger.record_disclosure("run", 5, "loss")
    with Ledger(path, create=False) as ledger:
        assert ledger.releases() == releases
        assert ledger.events() == [releases[0].update, chosen, releases[1].update, releases[2].update]
        assert ledger.latest_session() == session
        (refusal,), (disclosure,) = ledger.refusals(), ledger.disclosures()
    assert (refusal.run, refusal.round, refusal.reason) == ("run", 4, "why")
    assert (disclosure.run, disclosure.round, disclosure.what) == ("run", 5, "loss")
    assert began <= refusal.time <= disclosure.time <= time.time()


def _text(path: Path) -> None:
    path.write_text("client,releases\nward 7,3\n" * 100)


def _truncated(path: Path) -> None:
    fill(path, 60)
    path.write_bytes(path.read_bytes()[: path.stat().st_size - 5000])


def _scribbled(path: Path) -> None:
    fill(path, 60)
    content = bytearray(path.read_bytes())
    for start in range(4096, len(content), 4096):
        content[start : start + 100] = b"\xff" * 100
    path.write_bytes(content)


def _foreign(path: Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE patients (name TEXT)")


def _from_the_future(path: Path) -> None:
    fill(path, 1)
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version = 2")


def _folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("create", [True, False], ids=["client", "reader"])
@pytest.mark.parametrize("damage", [_text, _truncated, _scribbled, _foreign, _from_the_future, _folder])
def test_unusable_file_is_one_clear_line_and_left_as_it_is(
    path: Path, damage: Callable[[Path], None], create: bool
) -> None:
    damage(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(CoterieError, match=r"Expected .*ledger.* found.*") as caught:
        Ledger(path, create=create)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_version_and_foreign_errors_say_what_was_found(path: Path) -> None:
    _from_the_future(path)
    with pytest.raises(CoterieError, match=r"version 1 .* found 2: use the coterie that wrote it"):
        Ledger(path, create=True)
    path.unlink()
    _foreign(path)
    with pytest.raises(CoterieError, match="found another database"):
        Ledger(path, create=True)


def test_reading_a_missing_ledger_makes_none(path: Path) -> None:
    with pytest.raises(CoterieError, match="found none"):
        Ledger(path, create=False)
    assert not path.exists()


def test_reader_cannot_write(path: Path) -> None:
    fill(path, 1)
    with Ledger(path, create=False) as ledger, pytest.raises(CoterieError):
        ledger.record_release(a_release(2), budget=100)
    assert len(releases_in(path)) == 1


def _as_nobody(action: Callable[[], None]) -> str:
    """What ``action`` raised as an unprivileged user, in a process of its own: root may write anything."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            action()
            os.write(writer, b"nothing")
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def _open_to_all(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if not os.access(folder, os.W_OK) or folder == Path("/tmp"):
            break
        if folder.stat().st_mode & 0o005 != 0o005:
            folder.chmod(folder.stat().st_mode | 0o055)


@pytest.mark.parametrize("exists", [False, True], ids=["read-only folder", "read-only file"])
def test_unwritable_place_is_found_before_anything_is_trained(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    _open_to_all(tmp_path)
    path = folder / LEDGER_FILE
    if exists:
        fill(path, 1)
        path.chmod(0o444)
    folder.chmod(0o555)
    said = _as_nobody(lambda: Ledger(path, create=True).__exit__(None, None, None))
    folder.chmod(0o755)
    assert said.startswith("CoterieError: Expected"), said
    assert "\n" not in said
    assert path.exists() == exists


def test_full_database_records_nothing_and_goes_on_when_there_is_room(path: Path) -> None:
    with Ledger(path, create=True) as ledger:
        ledger.record_release(a_release(1), budget=1e9)
        pages = ledger._connection.execute("PRAGMA page_count").fetchone()[0]
        ledger._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(CoterieError, match=r"full.*nothing was sent"):
            ledger.record_release(a_release(2, sizes=(1,) * 2000), budget=1e9)
        assert [release.round for release in ledger.releases()] == [1]
        ledger._connection.execute("PRAGMA max_page_count = 100000")
        ledger.record_release(a_release(2, sizes=(1,) * 2000), budget=1e9)
    assert [release.round for release in releases_in(path)] == [1, 2]


def test_full_disk_records_nothing(path: Path) -> None:
    fill(path, 1)
    done = run_child(
        "import resource\n"
        "ledger = Ledger(Path(sys.argv[1]), create=True)\n"
        "size = Path(sys.argv[1]).stat().st_size\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))\n"
        "try:\n"
        "    ledger.record_release(a_release(2, sizes=(1,) * 2000), budget=1e9)\n"
        "except CoterieError as error:\n"
        "    print(error)\n"
        "    print(len(ledger.releases()))\n",
        path,
    )
    message, count = done.stdout.splitlines()
    assert message.startswith("Expected a usable ledger"), done.stderr
    assert count == "1"
    assert [release.round for release in releases_in(path)] == [1]


def test_busy_database_records_nothing(path: Path) -> None:
    with Ledger(path, create=True) as ledger, sqlite3.connect(path, isolation_level=None) as other:
        ledger._connection.execute("PRAGMA busy_timeout = 20")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(CoterieError, match="locked"):
            ledger.record_release(a_release(1), budget=100)
        other.execute("ROLLBACK")
        assert ledger.releases() == []


def test_failure_between_two_inserts_leaves_neither(path: Path) -> None:
    broken = replace(a_release(1, sizes=(9, 4)), layer_names=("only one",))
    with Ledger(path, create=True) as ledger:
        with pytest.raises(ValueError, match="zip"):
            ledger.record_release(broken, budget=100)
        assert ledger.releases() == []
        ledger.record_release(a_release(1), budget=100)


def test_impossible_events_are_not_recorded(path: Path) -> None:
    with Ledger(path, create=True) as ledger:
        for radius in (float("nan"), float("inf"), -1.0):
            with pytest.raises(ValueError, match="radius"):
                ledger.record_release(_with_noise(Noise(3, 1.0, radius)), budget=1e9)
        assert ledger.releases() == []


def _with_noise(noise: Noise) -> Release:
    return Release("x", 0.0, "run", 1, 0, False, False, ("all",), UpdateRelease(Neighbourhood.FIXED, (noise,)), None)


def test_ledgers_are_found_in_a_clients_folder_and_in_a_fleets(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match="found none"):
        find_ledgers(tmp_path)
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        fill(tmp_path / name / LEDGER_FILE, 1)
    (tmp_path / "no client").mkdir()
    assert find_ledgers(tmp_path) == [tmp_path / "a" / LEDGER_FILE, tmp_path / "b" / LEDGER_FILE]
    assert find_ledgers(tmp_path / "a") == [tmp_path / "a" / LEDGER_FILE]


def test_an_open_ledger_sees_what_is_added_and_nothing_that_was_rolled_back(path: Path) -> None:
    """It reads new rows only: one that it missed would be spent for nothing, one too many would be spent twice."""
    with Ledger(path, create=True) as one, Ledger(path, create=True) as other:
        one.record_release(a_release(1, sizes=(8, 3)), budget=1e9)
        assert other.releases() == one.releases() == [a_release(1, sizes=(8, 3))]
        with pytest.raises(BudgetExceeded):
            one.record_release(a_release(2), budget=1.0)
        other.record_release(a_release(3, selection=SelectionRelease("randomized-argmin", 3, 0.5)), budget=1e9)
        one.record_release(a_release(4), budget=1e9)
        assert one.releases() == other.releases() == releases_in(path)
        one.releases().clear()
        assert [release.round for release in one.releases()] == [1, 3, 4]
