"""Measure the time to build, verify and simulate a schedule, and compare it with torch's dry run of the same schedule.

    .venv/bin/python benchmarks/simulate/run.py [--quick]

Every measurement runs in its own process and is repeated. The table shows the median and the spread. torch's dry run
(torch.distributed.pipelining 2.13, `_simulate_comms_compute`) gets Penstock's schedule, with torch's own transfers
added. It counts steps of equal length; Penstock's simulation has costs, memory and links.
"""

import json
import statistics
import subprocess
import sys
import time

REPEATS = 5
TORCH_LIMIT_SECONDS = 120


def ours(name: str, lanes: int, mbs: int) -> dict[str, float]:
    """Build, verify and simulate once in this process."""
    import resource

    import penstock

    begin = time.perf_counter()
    schedule = penstock.schedules.build(name, lanes=lanes, micro_batches=mbs)
    built = time.perf_counter()
    penstock.schedules.verify(schedule)
    verified = time.perf_counter()
    timeline = penstock.simulate(schedule, penstock.Costs(forward=1.0, backward=2.0, transfer=0.1))
    assert 0 < timeline.bubble < 1
    assert max(timeline.peak_saved) > 0
    done = time.perf_counter()
    return {
        "actions": schedule.num_actions,
        "build": built - begin,
        "verify": verified - built,
        "simulate": done - verified,
        "total": done - begin,
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def theirs(name: str, lanes: int, mbs: int) -> dict[str, float]:
    """Run torch's dry run of the same schedule once in this process. The time excludes building and lowering."""
    from torch.distributed.pipelining import schedules as torchs

    import penstock

    schedule = penstock.schedules.build(name, lanes=lanes, micro_batches=mbs)
    compute = {n: [torchs._Action.from_str(str(a)) for a in lane] for n, lane in enumerate(schedule.lanes)}
    lowered = torchs._add_send_recv(compute, lambda stage: schedule.lane_of[stage], schedule.num_stages)
    begin = time.perf_counter()
    torchs._simulate_comms_compute(lowered, lambda stage: schedule.lane_of[stage], schedule.num_stages)
    return {"total": time.perf_counter() - begin}


def measure(what: str, case: tuple[str, int, int], *, repeats: int, limit: float) -> list[dict[str, float]] | None:
    """Run a case several times, each in a new process; return None if a process takes longer than the limit."""
    found = []
    for _ in range(repeats):
        command = [sys.executable, __file__, what, json.dumps(case)]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=True)
        except subprocess.TimeoutExpired:
            return None
        found.append(json.loads(run.stdout))
    return found


def show(runs: list[dict[str, float]], key: str) -> str:
    values = [run[key] for run in runs]
    return f"{statistics.median(values):.3g} ({min(values):.3g}–{max(values):.3g})"


def main() -> None:
    quick = "--quick" in sys.argv
    repeats = 1 if quick else REPEATS
    print("| schedule | lanes × micro-batches | actions | build s | verify s | simulate s | ", end="")
    print("together s | µs per action | peak GiB |")
    print("|---" * 9 + "|")
    cases = [("zb_h1", 64, mbs) for mbs in (128, 256, 512, 1024, 2048)]
    cases += [("1f1b", 64, 1024), ("1f1b", 256, 1024)] + ([] if quick else [("1f1b", 1024, 4096)])
    for case in cases:
        runs = measure("ours", case, repeats=min(repeats, 3) if case[1] > 500 else repeats, limit=600)
        assert runs is not None
        each = 1e6 * statistics.median(run["total"] for run in runs) / runs[0]["actions"]
        columns = [show(runs, key) for key in ("build", "verify", "simulate", "total")]
        print(f"| {case[0]} | {case[1]} × {case[2]} | {runs[0]['actions']:,.0f} | " + " | ".join(columns), end="")
        print(f" | {each:.2f} | {max(run['gib'] for run in runs):.2f} |", flush=True)
    print("\ntorch's dry run compared with Penstock (verify and simulate); the ratio is torch ÷ Penstock\n")
    print("| schedule | lanes × micro-batches | actions | torch s | Penstock s | ratio |")
    print("|---" * 6 + "|")
    for case in [
        (n, p, m) for n in ("1f1b", "zb_h1") for p, m in ((8, 32), (16, 64), (32, 128), (64, 256), (64, 1024))
    ]:
        peer = measure("theirs", case, repeats=min(repeats, 3), limit=TORCH_LIMIT_SECONDS)
        runs = measure("ours", case, repeats=repeats, limit=600)
        assert runs is not None
        own = statistics.median(run["verify"] + run["simulate"] for run in runs)
        theirs_text = f"over {TORCH_LIMIT_SECONDS}" if peer is None else show(peer, "total")
        ratio = (
            f"over {TORCH_LIMIT_SECONDS / own:.0f}"
            if peer is None
            else f"{statistics.median(r['total'] for r in peer) / own:.1f}"
        )
        print(
            f"| {case[0]} | {case[1]} × {case[2]} | {runs[0]['actions']:,.0f} | {theirs_text} | {own:.3g} | {ratio} |",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        name, lanes, mbs = json.loads(sys.argv[2])
        print(json.dumps({"ours": ours, "theirs": theirs}[sys.argv[1]](name, lanes, mbs)))
    else:
        main()
