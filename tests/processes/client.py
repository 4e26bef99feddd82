"""A client that does what the messages it receives say. Arguments: server, key file, seconds to retry."""

import logging
import sys
import time
from pathlib import Path

from flwr.app import Message

from coterie.client import engine
from coterie.client.keys import load_or_create_key
from coterie.errors import CoterieError

SECRET = "the data say 4711"


def main() -> int:
    """Serve until told to stop; exit statuses as a command would give them."""
    logging.raiseExceptions = False
    server, key_file, retry_for = sys.argv[1:4]
    engine.HEARTBEAT_INTERVAL_SECONDS = 10  # the least that Flower allows: a killed client is missed after 20 s
    engine.HEARTBEAT_EVERY_SECONDS = 3.0
    done = False

    def handle(message: Message) -> Message | None:
        nonlocal done
        order = message.content["order"]
        action = str(order["action"])
        say(f"got {action}")
        if action == "sleep":
            time.sleep(float(order["seconds"]))
        elif action == "raise":
            raise ValueError(SECRET)
        elif action == "fail":
            raise CoterieError("the ledger is full")
        elif action == "stop":
            done = True
        elif action == "silence":
            return None
        return Message(message.content, reply_to=message)

    try:
        engine.serve(
            server,
            load_or_create_key(Path(key_file)),
            handle,
            retry_for=float(retry_for),
            log=say,
            stop=lambda: done,
        )
    except CoterieError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    return 0


def say(line: str) -> None:
    """One line, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
