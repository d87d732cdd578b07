"""What a run says of itself before it starts: the numbers that the config, the data and the target lead to."""

from common.distributed.layout import DRAFTER, TARGET, Layout
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
            f"drafter  {spec.layers} layers, blocks of {spec.block_size}, {costs.drafter_parameters(spec) / 1e6:,.1f} M parameters, "
            f"mask token {spec.mask_token_id}",
            f"data     {len(plan.rows.store):,} documents in {len(packed):,} rows of {shape.row_tokens} ({packed.fill:.0%} filled), "
            f"{packed.truncated:,} truncated, {packed.dropped:,} dropped; {schedule.dropped_rows} rows at each epoch's end left out",
            f"steps    {schedule.steps:,} of {schedule.step_packets} packets, up to {plan.anchors} blocks each; "
            f"per epoch {schedule.steps_per_epoch:,}",
            *_costs(plan, layout),
        ]
    )


def _costs(plan: RunPlan, layout: Layout) -> list[str]:
    drafter = f"drafter {costs.drafter_bytes(plan) / GIB:.2f} GiB"
    try:
        size = costs.running_target(plan)
    except UnknownSize as error:
        return [f"memory   {drafter} (estimate per device); the target's is not known before it is loaded ({error})"]
    target = f"target {costs.target_bytes(plan, size) / GIB:.2f} GiB for {size.held / 1e6:,.1f} M parameters up to its last tap"
    lines = [f"memory   {target}; {drafter} (estimate per device)"]
    targets, drafters = (len(layout.exchange_group(role, 0)) for role in (TARGET, DRAFTER))
    if targets + drafters > 2:
        suggested = "{} targets + {} drafters".format(*costs.suggested_split(plan, size, targets + drafters))
        lines.append(f"split    {targets} targets + {drafters} drafters a group; by the arithmetic of both roles {suggested} would be even")
    return lines
