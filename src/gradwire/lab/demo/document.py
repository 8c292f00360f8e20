"""The demonstration's result as one JSON-able value; table and report read nothing else."""

from dataclasses import asdict
from typing import Any

from gradwire.lab.bench.machine import machine
from gradwire.lab.bench.setting import Measured
from gradwire.lab.demo import checks
from gradwire.lab.demo.plan import AUTO_RATE, Plan
from gradwire.lab.demo.race import Result
from gradwire.lab.emulate import Link


def document(
    plan: Plan,
    mode: str,
    link: Link,
    result: Result,
    measured_rows: list[dict[str, Any]],
    setup: dict[str, Any],
    everybody: list[Measured],
) -> dict[str, Any]:
    """Settings, machine, rows (as in a bench), courses of all runs, timelines, checks, notes, failures."""
    return {
        "settings": {
            **asdict(plan),
            "rate": f"{link}" if plan.rate == AUTO_RATE else plan.rate,
            "rate_bit_per_s": link.rate_bit_per_s,
            "rate_chosen_here": plan.rate == AUTO_RATE,
            "mode": mode,
            "workload_facts": {"parameters": setup.get("parameters"), **(setup.get("workload") or {})},
        },
        "machine": machine(),
        "rows": measured_rows,
        "courses": [course.as_dict() for course in result.courses],
        "at_same_time": result.at_same_time,
        "timelines": result.timelines,
        "checks": [check.as_dict() for check in _checks(plan, result, measured_rows)],
        "notes": result.notes,
        "seconds": result.seconds,
        "failures": [_failure(item) for item in everybody if item.failure is not None],
    }


def _checks(plan: Plan, result: Result, measured_rows: list[dict[str, Any]]) -> list[checks.Check]:
    by_kind = {row["kind"]: row for row in measured_rows}
    wire, ddp = by_kind["recipe"], by_kind["peer"]
    return [
        *checks.speed(wire),
        checks.beside_free_ddp(wire, result.courses),
        checks.quality(result.courses, plan.steps),
        checks.same_time(result.at_same_time, result.courses),
        checks.replicas(result.courses),
        checks.counted_bytes(wire),
        checks.counted_bytes(ddp),
    ]


def _failure(item: Measured) -> dict[str, str]:
    assert item.failure is not None
    return {"name": item.entry.name, "reason": item.failure.reason, "detail": item.failure.detail}
