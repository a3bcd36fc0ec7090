"""A task that does nothing but count itself outside the engine."""

from __future__ import annotations

from ledger import note

from leasetask import App, AsyncContext

app = App()


@app.task
async def noop(ctx: AsyncContext, number: int) -> None:
    note(str(number))
