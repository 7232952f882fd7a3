"""The papers' exhibits, recomputed, with the published values beside ours."""

from typing import Any

from herald_pipeline.errors import unknown_name
from herald_pipeline.hardware import Profile

_HERALD = ("table-2", "fig-4", "fig-5", "fig-8", "fig-12", "fig-13", "fig-14", "budget-cost", "fit", "identified")
_DSB = ("dsb-main", "dsb-table-3", "dsb-example")
NAMES = _HERALD + _DSB


def rows(name: str, profile: Profile) -> list[dict[str, Any]]:
    """Rows of the exhibit called ``name``; those of the DSB article do not depend on the profile."""
    if name not in NAMES:
        raise unknown_name("exhibit", name, NAMES)
    if name in _DSB:
        from herald_sim.exhibits import dsb

        makers = {"dsb-main": dsb.main_table, "dsb-table-3": dsb.table_3, "dsb-example": dsb.worked_example}
        return makers[name]()
    if name in ("fit", "identified"):
        from herald_sim.exhibits import fits

        return fits.rows(profile) if name == "fit" else fits.identified(profile)
    from herald_sim.exhibits.herald import EXHIBITS

    return EXHIBITS[name](profile)
