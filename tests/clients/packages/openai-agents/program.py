"""An agent with a handbook and a tool. `--continue` goes on with the conversation that is kept in the home folder."""

import asyncio
import os
import sys
from pathlib import Path

from agents import Agent, Runner, SQLiteSession, function_tool


@function_tool
def boats_at(pier: int) -> str:
    """Tell which boats lie at a pier.

    Args:
        pier: The pier's number.
    """
    return f"Two boats lie at pier {pier}."


async def main() -> None:
    agent = Agent(
        name="Clerk", instructions=Path("handbook.txt").read_text(), model=os.environ["OPENAI_MODEL"], tools=[boats_at]
    )
    kept = Path.home() / "conversation.db"
    if sys.argv[1] != "--continue":
        kept.unlink(missing_ok=True)
    run = Runner.run_streamed(agent, sys.argv[-1], session=SQLiteSession("one", kept))
    async for _ in run.stream_events():
        pass
    print(run.final_output)


asyncio.run(main())
