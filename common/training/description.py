"""What a run says of itself before it starts: the numbers that the config, the data and the target lead to."""

from common.distributed.layout import DRAFTER, TARGET, Layout
from common.families.registry import FAMILIES
from common.families.start import target_layer_sources
from common.target.meta import UnknownSize
from common.training import costs
from common.training.plan import RunPlan

GIB = 1 << 30


def describe(plan: RunPlan, layout: Layout) -> str:
    """A few lines for the log's head; what the target costs is left out, with the reason, where it cannot be told."""
    packed, schedule, shape, spec = plan.rows.packed(), plan.schedule, plan.shape, plan.drafter
    return "\n".join(
        [
            f"target   {plan.config.target.path}: {plan.target.layers} layers of {plan.target.hidden_size}, taps {list(spec.taps)}",
            f"drafter  {spec.family}, {spec.layers} layers, blocks of {spec.block_size}, {costs.drafter_parameters(spec) / 1e6:,.1f} M "
            f"parameters, mask token {spec.mask_token_id}",
            f"data     {len(plan.rows.store):,} documents in {len(packed):,} rows of {shape.row_tokens} ({packed.fill:.0%} filled), "
            f"{packed.truncated:,} truncated, {packed.dropped:,} dropped; {schedule.dropped_rows} rows at each epoch's end left out",
            f"steps    {schedule.steps:,} of {schedule.step_packets} packets, up to {plan.anchors} blocks each; "
            f"per epoch {schedule.steps_per_epoch:,}",
            *_left_out(plan),
            *_copied(plan),
            *_costs(plan, layout),
        ]
    )


def _left_out(plan: RunPlan) -> list[str]:
    if FAMILIES[plan.drafter.family].teaches == "nothing" or plan.config.objective.teacher:
        return []
    return [f"loss     of {plan.drafter.family} without the target's distribution (objective.teacher=false): its other terms alone"]


def _copied(plan: RunPlan) -> list[str]:
    if plan.config.drafter.init != "target_layers":
        return []
    sources = target_layer_sources(plan.drafter, plan.folder, plan.config.target.trust_remote_code)
    random = sorted({name.split(".", 2)[-1] for name, source in sources.items() if source is None})
    copied = sum(source is not None for source in sources.values())
    return [f"start    copied {copied} of {len(sources)} tensors of the target's layers" + (f"; not {', '.join(random)}" if random else "")]


def _costs(plan: RunPlan, layout: Layout) -> list[str]:
    lines = [_stages(plan)] if len(plan.stages) > 1 else []
    drafter = f"drafter {costs.drafter_bytes(plan) / GIB:.2f} GiB"
    try:
        sizes = costs.stage_sizes(plan)
    except UnknownSize as error:
        return [*lines, f"memory   {drafter} (estimate per device); the target's is not known before it is loaded ({error})"]
    target, held = (" + ".join(f"{n / GIB:.2f}" for n in costs.target_bytes(plan, sizes)), sum(size.held for size in sizes))
    lines.append(f"memory   target {target} GiB for {held / 1e6:,.1f} M parameters up to its last tap; {drafter} (estimate per device)")
    targets, drafters = (len(layout.exchange_group(role, 0)) for role in (TARGET, DRAFTER))
    ranks = targets * len(plan.stages) + drafters
    if ranks > len(plan.stages) + 1:
        suggested = "{} targets + {} drafters".format(*costs.suggested_split(plan, sizes, ranks))
        each = f" of {len(plan.stages)} stages" if len(plan.stages) > 1 else ""
        lines.append(
            f"split    {targets} targets{each} + {drafters} drafters a group; by the arithmetic of both roles {suggested} would be even"
        )
    return lines


def _stages(plan: RunPlan) -> str:
    """Which layers each stage of a target runs, and why these."""
    ranges = ", ".join(f"{stage.layers.start}-{stage.layers.stop - 1}" for stage in plan.stages if stage.layers is not None)
    return f"stages   layers {ranges}: even in {plan.stages_even_in}"
