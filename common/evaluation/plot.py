"""A report's curves: acceptance by slot, and tau and speed-up by block size; as PNG and as TensorBoard's figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError


def check_plot() -> None:
    """Raises: UserError without matplotlib, which nothing else here needs."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from None


def plot(report: Mapping[str, Any], folder: str | Path) -> Path:
    """Write evaluation.png and TensorBoard's events of it into a folder; returns the picture's path."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from torch.utils.tensorboard import SummaryWriter

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    slots = range(1, len(report["cumulative_acceptance"]) + 1)
    for name in ("cumulative_acceptance", "conditional_acceptance"):
        left.plot(slots, [share or 0.0 for share in report[name]], marker="o", label=name.replace("_", " "))
    left.set(xlabel="slot", ylabel="share of verifications", ylim=(0, 1), title=report["lead"])
    left.legend()
    sizes = [int(size) for size in report["tau_by_block_size"]]
    right.plot(sizes, list(report["tau_by_block_size"].values()), marker="o", label="tau")
    for batch in dict.fromkeys(case["batch"] for case in report.get("advice", ())):
        chains = [case for case in report["advice"] if case["batch"] == batch and case["tree_budget"] is None]
        points = [case["block_size"] for case in chains], [case["speedup"] for case in chains]
        right.plot(*points, marker="o", linestyle="--", label=f"expected speed-up, {batch} at a time")
    right.set(xlabel="block size", title=f"{report['prompts']} answers")
    right.legend()
    picture = folder / "evaluation.png"
    figure.savefig(picture, dpi=120)
    with SummaryWriter(str(folder)) as events:
        events.add_figure("evaluation", figure)
        for size, tau in zip(sizes, report["tau_by_block_size"].values(), strict=True):
            events.add_scalar("evaluation/tau_by_block_size", tau or 0.0, size)
    return picture
