"""Tools for other models (MCP), which Gradio calls over HTTP from itself: no thread for each, and for nobody who left.

As it comes, each call takes one of the forty threads that also serve the page until its answer is there.
"""

import asyncio
from typing import Any

from gradio.blocks import Blocks
from gradio_client import Client


def adapt(page: Blocks) -> None:
    """Once `page` is launched."""
    server: Any = page.mcp_server_obj
    # Else the first call makes it, in a thread; and forty first calls wait for each other.
    server._client_instance = Client(
        page.local_url,
        download_files=False,
        verbose=False,
        analytics_enabled=False,
        ssl_verify=False,
        _skip_components=False,
        headers={"x-gradio-user": "mcp"},
    )
    follow = server._execute_tool_with_progress

    async def wait(job: Any) -> list[Any]:
        try:
            return [await asyncio.wrap_future(job.future)]
        finally:
            leave(job)

    async def wait_with_progress(job: Any, progress_token: str | int) -> list[Any]:
        try:
            return await follow(job, progress_token)
        finally:
            leave(job)

    server._execute_tool_without_progress = wait
    server._execute_tool_with_progress = wait_with_progress


def leave(job: Any) -> None:
    """Cancel a call that has not ended: whoever asked has gone."""
    if not job.done():
        asyncio.get_running_loop().run_in_executor(None, job.cancel)  # asks this server, so it must not wait here
