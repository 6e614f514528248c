"""Draw a benchmark's mean ranks with the critical difference (Demsar, JMLR 2006, section 3.2.2)."""

import textwrap

from matplotlib.figure import Figure

from fedexp.analysis.benchmark import Ranking
from fedexp.figures.style import BLUE, panels


def diagram(ranking: Ranking) -> Figure:
    """Draw the mean rank of each method, the best at the top.

    Each bar is as long as the critical difference and centred on the mean rank. Methods whose bars
    do not overlap differ significantly.
    """
    found, count = ranking.comparison, len(ranking.comparison.methods)
    title = "\n".join(textwrap.wrap(ranking.title, 90))
    figure, ((axes,),) = panels(title, 1.4 + 0.2 * count)
    half = found.critical_difference / 2
    axes.errorbar(found.ranks, range(count), xerr=half, fmt="o", color=BLUE, markersize=4)
    axes.set_yticks(range(count), found.methods)
    axes.set_ylim(count - 0.4, -0.6)
    axes.set_xlim(0, count + 1)
    axes.set_xlabel(f"mean rank (bars: CD = {found.critical_difference:.2f})")
    return figure
