"""Inside the sandbox of an agent: its model's address, and the start of its program.

The sandbox has no network. This program listens on its loopback, hands each connection on to the
Unix socket of the agent's session, runs the agent, and ends as it did; or as soon as the session
does, whose other socket it holds open. Runs by `python -c`, so it imports the standard library
alone; standard input has what it is to do, as JSON.
"""

import asyncio
import json
import os
import re
import sys

ENDED_WITH_SESSION = 137
_READ_BYTES = 1 << 16


async def main() -> None:
    setup = json.loads(sys.stdin.buffer.read())
    control, _ = await asyncio.open_unix_connection(setup["control"])

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_unix_connection(setup["socket"])
        await asyncio.gather(copy(reader, requests), copy(answers, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    root = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    values = setup["values"] | {"base_url": f"{root}/v1", "root_url": root}
    names = re.compile(r"\{(" + "|".join(values) + r")\}")

    def filled(text: str) -> str:
        return names.sub(lambda found: values[found[1]], text)

    variables = {name: filled(text) for name, text in setup["variables"].items()}
    process = await asyncio.create_subprocess_exec(
        *map(filled, setup["command"]),
        stdin=asyncio.subprocess.DEVNULL,
        env={**os.environ, **variables},
    )
    ended, closed = asyncio.ensure_future(process.wait()), asyncio.ensure_future(control.read(1))
    await asyncio.wait({ended, closed}, return_when=asyncio.FIRST_COMPLETED)
    status = ended.result() if ended.done() else ENDED_WITH_SESSION
    os._exit(status if status >= 0 else 128 - status)


async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(_READ_BYTES):
            target.write(data)
            await target.drain()
    except ConnectionError:
        pass  # one side let go
    finally:
        target.close()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except FileNotFoundError as error:
        sys.exit(f"the agent's command cannot be run: {error}")
