"""The summary on the terminal: the recommendation, its reasons, its changes, and the best configurations. Pure."""

from collections.abc import Sequence

from charonia.tools.results.records import Estimate
from charonia.tools.tune.api import Metric
from charonia.tools.tune.decision import GAIN_MAX, Conclusion, Ranked, loads_text
from charonia.tools.tune.result import GroupRecord, TuneRun

_COLUMNS = ("configuration", "instances", "max batch", "load", "infer/s", "p99 ms", "memory MB", "over default")
_CHANGE_LINES_MAX = 60
_SKIPPED_MAX = 6


def summary(run: TuneRun, configs_per_model: int = 3, names: Sequence[str] = (), top_configs: int = 0) -> str:
    """Return the summary of a run.

    Args:
        run: The run.
        configs_per_model: Variants of each model beside the default one.
        names: Just these variants, () for the best.
        top_configs: Variants of all models together, 0 for no such table.
    """
    blocks = [_group(group, configs_per_model, names) for group in run.groups]
    if top_configs and len(run.groups) > 1:
        blocks.append(_top(run, top_configs))
    if run.problem:
        blocks.append(f"The run ended early: {run.problem}. What was measured is kept; the same command goes on.")
    elif run.is_interrupted:
        blocks.append("Interrupted. What was measured is kept; the same command goes on from there.")
    return "\n\n".join(blocks)


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines in columns with two blanks between them, the first line on top of a rule."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([shown[0], "-" * max(map(len, shown)), *shown[1:]])


def _group(group: GroupRecord, configs_per_model: int, names: Sequence[str]) -> str:
    decision = group.decision
    head = f"{' and '.join(group.models)}: {group.extent} in {group.duration_s:.0f} s"
    resumed = sum(trial.is_resumed for trial in group.trials)
    if resumed:
        head += f", {resumed} of them from the journal"
    blocks = [head, "\n".join((*decision.sentences, *filter(None, [group.disturbance])))]
    shown = _shown(group, configs_per_model, names)
    if shown:
        has_tokens = any(Metric.OUTPUT_TOKENS in metrics for ranked in shown for metrics in ranked.metrics.values())
        tokens = _TOKENS if has_tokens else {}
        columns = [*_COLUMNS[:_TOKENS_AT], *tokens.values(), *_COLUMNS[_TOKENS_AT:]]
        blocks.append(table([columns, *(_line(group, ranked, tuple(tokens)) for ranked in shown)]))
    blocks.append(_change(group))
    blocks.append(_not_measured(group))
    return "\n\n".join(block for block in blocks if block)


def _not_measured(group: GroupRecord) -> str:
    """Return the variants without a measurement, those with the same reason on one line."""
    variants: dict[str, list[str]] = {}
    for skipped in group.skipped:
        reason = next(iter(skipped.reason.splitlines()), "")
        variants.setdefault(reason, []).append(str(skipped.variant))
    if not variants:
        return ""
    lines = []
    for reason, names in variants.items():
        more = f" and {len(names) - 1} other configurations" if len(names) > 1 else ""
        lines.append(f"  {names[0]}{more}: {reason}")
    rest = [f"  and {len(lines) - _SKIPPED_MAX} other reasons"] if len(lines) > _SKIPPED_MAX else []
    return "\n".join(["Not measured:", *lines[:_SKIPPED_MAX], *rest])


def _shown(group: GroupRecord, configs_per_model: int, names: Sequence[str]) -> list[Ranked]:
    ranking = group.decision.ranking
    if names:
        return [ranked for ranked in ranking if _name(group, ranked) in names]
    best = list(ranking[:configs_per_model])
    for extra in (group.decision.best, group.decision.default):
        if extra is not None and all(extra.variant.key != ranked.variant.key for ranked in best):
            best.append(extra)
    return best


_TOKENS_AT = 6
_TOKENS = {Metric.OUTPUT_TOKENS: "tokens/s", Metric.TTFT_P99: "TTFT p99 ms", Metric.ITL_P99: "ITL p99 ms"}
"""Columns of language models, after the latency."""


def _line(group: GroupRecord, ranked: Ranked, tokens: Sequence[Metric] = ()) -> list[str]:
    record = group.variant(ranked.variant)
    configs = record.configs if record is not None else ()
    tuned = [config for config in configs if not config.is_profiled] or list(configs)
    is_best = group.decision.best is not None and ranked.variant.key == group.decision.best.variant.key
    return [
        f"{'*' if is_best else ' '} {_name(group, ranked)}",
        ",".join(config.instance_group for config in tuned),
        ",".join(str(config.max_batch_size) for config in tuned),
        loads_text(ranked.loads),
        _metric(ranked, Metric.THROUGHPUT, 0),
        _metric(ranked, Metric.LATENCY_P99, 2),
        *(_metric(ranked, metric, 0 if metric is Metric.OUTPUT_TOKENS else 2) for metric in tokens),
        _metric(ranked, Metric.CPU_USED_RAM, 0).partition("; ")[0],  # the server's, the same for every model
        _over_default(ranked),
    ]


def _over_default(ranked: Ranked) -> str:
    if ranked.gain is None or ranked.variant.is_default:
        return ""
    return _percent(ranked.gain) + (", other load" if ranked.between_loads else "")


def _metric(ranked: Ranked, metric: Metric, digits: int) -> str:
    found = [metrics[metric] for metrics in ranked.metrics.values() if metric in metrics]
    return "; ".join(_estimate(estimate, digits) for estimate in found)


def _estimate(estimate: Estimate, digits: int) -> str:
    text = f"{estimate.value:,.{digits}f}"
    if not estimate.confidence:
        return text
    return f"{text} ({estimate.low:,.{digits}f} to {estimate.high:,.{digits}f})"


def _percent(share: Estimate) -> str:
    high = f"{share.high:+.1%}" if share.high < GAIN_MAX else f"more than {GAIN_MAX:+.0%}"
    return f"{share.value:+.1%} ({share.low:+.1%} to {high})"


def _name(group: GroupRecord, ranked: Ranked) -> str:
    record = group.variant(ranked.variant)
    return record.name if record is not None else str(ranked.variant)


def _change(group: GroupRecord) -> str:
    best = group.decision.best
    record = group.variant(best.variant) if best is not None else None
    if record is None or group.decision.conclusion is Conclusion.CONSTRAINTS_NOT_MET:
        return ""
    lines = []
    for config in record.configs:
        if config.diff:
            lines += [f"Change of {config.model} ({config.name}/config.pbtxt):", *_indented(config.diff)]
    return "\n".join(lines)


def _indented(diff: str) -> list[str]:
    lines = [f"  {line}" for line in diff.splitlines()[2:]]
    return lines if len(lines) <= _CHANGE_LINES_MAX else [*lines[:_CHANGE_LINES_MAX], "  ..."]


def _top(run: TuneRun, count: int) -> str:
    ranked = [(group, each) for group in run.groups for each in group.decision.ranking]
    ranked.sort(key=lambda pair: (not pair[1].keeps_constraints, -(pair[1].gain.value if pair[1].gain else 0.0)))
    return table([_COLUMNS, *(_line(group, each) for group, each in ranked[:count])])
