"""A program that starts its worker at top level: whoever imports it starts one too."""

from __future__ import annotations

from ledger import hold, note

from leasetask import App, Context

app = App()


@app.task
def odd(ctx: Context) -> None:
    note("odd")


note("imported")
with app.start(lease=1.0):
    hold("end")
