"""An agent with a handbook and a tool. `--continue` goes on with the conversation that is kept in the home folder."""

import asyncio
import os
import sys
from pathlib import Path

from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessagesTypeAdapter
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
model = OpenAIChatModel(os.environ["OPENAI_MODEL"], provider=provider)
agent = Agent(model, instructions=Path("handbook.txt").read_text())


@agent.tool_plain
def boats_at(pier: int) -> str:
    """Tell which boats lie at a pier."""
    return f"Two boats lie at pier {pier}."


async def main() -> None:
    kept = Path.home() / "conversation.json"
    said = ModelMessagesTypeAdapter.validate_json(kept.read_bytes()) if sys.argv[1] == "--continue" else None
    async with agent.run_stream(sys.argv[-1], message_history=said) as run:
        print(await run.get_output())
        kept.write_bytes(run.all_messages_json())


asyncio.run(main())
