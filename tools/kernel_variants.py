"""What tools/kernel_lab.py compares: edits of the authored sources. "base" is the source as it is."""

_TUNING = "constexpr ScheduleTuning kScheduleTuning = {kTileTokens * kWarps, 16384, 512};"


def _schedule(single_round_slots: int, tail_chunk: int) -> tuple[str, str, str]:
    changed = _TUNING.replace("16384, 512", f"{single_round_slots}, {tail_chunk}")
    return ("tuning.cuh", _TUNING, changed)


_FIRST_ROUND = "round == 0 ? per_worker - (per_worker >> 2) : per_worker >> (round + 2)"
_SEVEN_EIGHTHS = "round == 0 ? per_worker - (per_worker >> 3) : per_worker >> (round + 3)"

_FIFTEEN_SIXTEENTHS = "round == 0 ? per_worker - (per_worker >> 4) : per_worker >> (round + 4)"

_ROUNDS = [_schedule(1024, 256)]
_COPY = (
    'asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(dst), "l"(src),\n'
    '               "r"(valid), "l"(policy)\n'
    '               : "memory");'
)
_PLAIN_COPY = (
    'asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" '
    '::"r"(dst), "l"(src), "r"(valid) : "memory");'
)

VARIANTS: dict[str, list[tuple[str, str, str]]] = {
    "base": [],
    "rounds": _ROUNDS,
    "rounds 7/8": [*_ROUNDS, ("schedule.h", _FIRST_ROUND, _SEVEN_EIGHTHS)],
    "rounds 15/16": [*_ROUNDS, ("schedule.h", _FIRST_ROUND, _FIFTEEN_SIXTEENTHS)],
    "rounds coarse": [_schedule(1024, 512)],
    "no policy": [("ptx.cuh", _COPY, _PLAIN_COPY)],
}
