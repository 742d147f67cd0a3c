"""Plant faults in the library, one at a time, and see which tests catch them.

python -m tests.mutants cover             # once: which test runs which line
python -m tests.mutants run --workers 2   # resumes where it stopped, and runs again what a test that is gone caught
python -m tests.mutants report
python -m tests.mutants raises            # errors with a text that no test raises
python -m tests.mutants draw --count 300  # other faults, of another seed
python -m tests.mutants draw --missing    # others for those whose place has gone
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence, Set
from pathlib import Path

from tests.mutants.covering import Covering, cover, present_tests, unreached
from tests.mutants.faults import Fault, load, planted, save
from tests.mutants.planting import draw, redraw
from tests.mutants.running import Copy, Result

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("faults.json")  # drawn
REVERTS = Path(__file__).with_name("reverts.json")  # of faults that the history has mended


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=("cover", "run", "report", "raises", "draw"))
    parser.add_argument("--folder", type=Path, default=ROOT / ".mutants", help="what was measured (default %(default)s)")
    parser.add_argument("--only", default="*", help="a glob of titles of faults, as report prints them")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests for each fault")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so long (default: when all have run)")
    parser.add_argument("--fast", action="store_true", help="only tests of the fast loop")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--missing", action="store_true", help="draw only where the place of a fault has gone")
    options, rest = parser.parse_known_args(arguments)
    if options.command == "cover":
        return cover(ROOT, options.folder, rest)
    if options.command == "raises":
        print(*unreached(ROOT, options.folder), sep="\n")
        return 0
    if options.command == "draw":
        drawn = redraw(ROOT, load(FAULTS), options.seed) if options.missing else draw(ROOT, options.count, options.seed)
        save(FAULTS, drawn)
        return 0
    every = [*load(FAULTS), *load(REVERTS)]
    faults = [fault for fault in every if fnmatch.fnmatch(fault.title, f"*{options.only}*")]
    results = options.folder / ("fast.json" if options.fast else "results.json")
    known = {title: Result(*row) for title, row in json.loads(results.read_text()).items()} if results.exists() else {}
    if options.command == "run":
        if not (options.folder / "seconds.json").exists():
            parser.error(f"{options.folder} holds no coverage: run python -m tests.mutants cover first")
        run(faults, known, results, options)
    return report(faults, known)


def run(faults: Sequence[Fault], known: dict[str, Result], results: Path, options: argparse.Namespace) -> None:
    """Run the faults that have no result yet, or whose test has gone, and write each result at once."""
    present = present_tests(ROOT)
    covering = Covering(ROOT, options.folder, present)
    for key in [key for key, result in known.items() if has_gone(result, present)]:
        del known[key]
    todo: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    for fault in faults:
        if key_of(fault) not in known and not fault.equivalent:
            todo.put(fault)
    end = time.monotonic() + (options.minutes * 60 or float("inf"))
    lock, total = threading.Lock(), todo.qsize()

    def work(number: int) -> None:
        copy = Copy(ROOT, options.folder / f"worker-{number}")
        while time.monotonic() < end:
            try:
                fault = todo.get_nowait()
            except queue.Empty:
                break
            changed = planted((ROOT / fault.file).read_text(), fault)
            lines = range(0) if changed is None else changed[1]
            with lock:  # sqlite
                tests = covering.tests_of(fault, lines, options.budget, fast=options.fast)
            result = copy.run(fault, tests, 3 * options.budget + 60)
            with lock:
                known[key_of(fault)] = result
                results.write_text(json.dumps(known, indent=0, ensure_ascii=False))
                print(f"{total - todo.qsize()}/{total} {result.outcome} in {result.seconds} s: {fault.title}", flush=True)
        copy.close()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(options.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def has_gone(result: Result, present: Set[str]) -> bool:
    """Return whether the test that caught a fault is no longer there."""
    named = result.outcome == "caught" and "::" in result.test
    return named and result.test not in present and not any(test.startswith(result.test) for test in present)


def key_of(fault: Fault) -> str:
    """Return what a fault's result is kept under."""
    return "|".join((fault.file, fault.function, fault.kind, fault.before, fault.after, str(fault.number)))


def report(faults: Sequence[Fault], known: dict[str, Result]) -> int:
    """Print who caught what, and the shares; return whether any fault survived."""
    counts: dict[str, Counter[str]] = {}
    for fault in faults:
        wing = counts.setdefault(fault.file.split("/")[1], Counter())
        result = known.get(key_of(fault))
        outcome = "equivalent" if fault.equivalent else result.outcome if result else "not run"
        wing[outcome] += 1
        if outcome == "caught" and result is not None:
            print(f"caught in {result.seconds:5.1f} s by {result.test}: {fault.title}")
    for fault in faults:
        result = known.get(key_of(fault))
        if not fault.equivalent and result is not None and result.outcome != "caught":
            print(f"{result.outcome} {result.tests} tests: {fault.title}")
    total: Counter[str] = sum(counts.values(), Counter())
    for wing, numbers in {**counts, "all": total}.items():
        ran = numbers["caught"] + numbers["survived"]
        share = f"{numbers['caught'] / ran:.0%}" if ran else "–"
        print(f"{wing:>10}: {share} caught; {', '.join(f'{count} {outcome}' for outcome, count in numbers.items())}")
    return int(total["survived"] > 0)


if __name__ == "__main__":
    sys.exit(main())
