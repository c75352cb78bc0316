"""The summary on the terminal: the recommendation, its reasons, its changes, and the best configurations. Pure."""

from collections.abc import Sequence

from charonia.tools.report.quantities import in_columns, number
from charonia.tools.results.records import Estimate
from charonia.tools.tune.api import Metric, counted_noun
from charonia.tools.tune.decision import GAIN_MAX, Conclusion, Ranked, loads_text
from charonia.tools.tune.result import GroupRecord, TuneRun

_COLUMNS = ("configuration", "instances", "batch", "delay", "load", "infer/s", "p99 ms", "memory", "over default")
_TOKEN_COLUMNS = (*_COLUMNS[:5], "tokens/s", "TTFT p99 ms", "ITL p99 ms", *_COLUMNS[7:])
_NAME_LENGTH_MAX = 24
_CHANGE_LINES_MAX = 60
_SKIPPED_MAX = 6


def summary(run: TuneRun, configs_per_model: int = 3, names: Sequence[str] = (), top_configs: int = 0) -> str:
    """Return the summary of a run.

    Args:
        names: Just these variants, () for the best.
        top_configs: Variants of all models together, 0 for no such table.
    """
    blocks = [_group(group, configs_per_model, names) for group in run.groups]
    if top_configs and len(run.groups) > 1:
        blocks.append(_top(run, top_configs))
    if run.problem:
        blocks.append(f"The run ended early: {run.problem}. The measurements are kept; the same command resumes.")
    elif run.is_interrupted:
        blocks.append("Interrupted. The measurements are kept; the same command resumes.")
    return "\n\n".join(blocks)


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines in columns with two blanks between them, the first line on top of a rule."""
    shown = in_columns(lines)
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
        lines: list[tuple[str, ...]] = [_TOKEN_COLUMNS if has_tokens else _COLUMNS]
        lines += [_line(group, ranked, _TOKENS if has_tokens else _REQUESTS) for ranked in shown]
        blocks.append(table(lines))
        if any(line[-1].endswith(_OTHER_LOAD) for line in lines[1:]):
            blocks.append(f"{_OTHER_LOAD} The default configuration does best under another load.")
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
        more = f" and {counted_noun(len(names) - 1, 'other configuration')}" if len(names) > 1 else ""
        lines.append(f"  {names[0]}{more}: {reason}")
    rest = [f"  and {counted_noun(len(lines) - _SKIPPED_MAX, 'other reason')}"] if len(lines) > _SKIPPED_MAX else []
    return "\n".join(["Not measured:", *lines[:_SKIPPED_MAX], *rest])


def _shown(group: GroupRecord, configs_per_model: int, names: Sequence[str]) -> list[Ranked]:
    ranking = group.decision.ranking
    if names:
        records = [(ranked, group.variant(ranked.variant)) for ranked in ranking]
        return [ranked for ranked, record in records if record is not None and record.is_named(names)]
    best = list(ranking[:configs_per_model])
    for extra in (group.decision.best, group.decision.default):
        if extra is not None and all(extra.variant.key != ranked.variant.key for ranked in best):
            best.append(extra)
    return best


_OTHER_LOAD = "*"
_REQUESTS = (Metric.THROUGHPUT, Metric.LATENCY_P99)
_TOKENS = (Metric.OUTPUT_TOKENS, Metric.TTFT_P99, Metric.ITL_P99)


def _line(group: GroupRecord, ranked: Ranked, metrics: Sequence[Metric]) -> tuple[str, ...]:
    record = group.variant(ranked.variant)
    tuned = record.tuned if record is not None else ()
    is_best = group.decision.best is not None and ranked.variant.key == group.decision.best.variant.key
    memory = _values(ranked, Metric.CPU_USED_RAM)[:1]  # the server's, the same for every model
    name = _name(group, ranked)
    return (
        f"{'>' if is_best else ' '} {name if len(name) <= _NAME_LENGTH_MAX else f'…{name[1 - _NAME_LENGTH_MAX :]}'}",
        ",".join(config.instance_group for config in tuned),
        ",".join(str(config.max_batch_size) for config in tuned),
        ",".join("-" if config.queue_delay_us is None else f"{config.queue_delay_us} us" for config in tuned),
        loads_text(ranked.loads),
        *("; ".join(map(_estimate, _values(ranked, metric))) for metric in metrics),
        "; ".join(f"{number(value.value)} MB" for value in memory),
        _over_default(ranked),
    )


def _over_default(ranked: Ranked) -> str:
    if ranked.gain is None or ranked.variant.is_default:
        return ""
    return _percent(ranked.gain) + (f" {_OTHER_LOAD}" if ranked.between_loads else "")


def _values(ranked: Ranked, metric: Metric) -> list[Estimate]:
    return [metrics[metric] for metrics in ranked.metrics.values() if metric in metrics]


def _estimate(estimate: Estimate) -> str:
    if not estimate.confidence or not estimate.value:
        return number(estimate.value)
    return f"{number(estimate.value)} ±{100 * estimate.relative_half_width:.0f} %"


def _percent(share: Estimate) -> str:
    high = f"{100 * share.high:+.0f}" if share.high < GAIN_MAX else f"over {100 * GAIN_MAX:.0f}"
    return f"{100 * share.value:+.0f} % [{100 * share.low:+.0f}, {high}]"


def _name(group: GroupRecord, ranked: Ranked) -> str:
    record = group.variant(ranked.variant)
    return record.short_name if record is not None else str(ranked.variant)


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
    return table([_COLUMNS, *(_line(group, each, _REQUESTS) for group, each in ranked[:count])])
