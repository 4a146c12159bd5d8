"""What a model's chat template puts around a message, rendered in a process of its own.

A template is a program that a checkpoint brings. Jinja's sandbox keeps it from files and from Python, but not from
looping for ever or from asking for all memory: here it has a few seconds and a bounded heap, once, before anything is
measured.
"""

import functools
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from fp8dash.errors import ModelError

MESSAGE = "What is asked, word for word: 7 x 6?"  # any text that a template has no reason to change
CPU_SECONDS, WALL_SECONDS = 10, 120  # of rendering; and with the imports, however busy the machine
MEMORY = 1 << 30  # bytes beside what the imports take
LONGEST = 1 << 20  # characters of a rendered message
WAY_ON = "choose --needle-chat off and the plain task prompt, or fix the template."
RENDER = """
import json, resource, sys
from transformers.utils.chat_template_utils import render_jinja_template
task = json.load(sys.stdin)
used = resource.getrusage(resource.RUSAGE_SELF)
seconds = int(used.ru_utime + used.ru_stime) + task["seconds"]
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
if sys.platform == "linux":
    pages = int(open("/proc/self/statm").read().split()[0])
    most = pages * resource.getpagesize() + task["memory"]
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
turn = [{"role": "user", "content": task["message"]}]
try:
    (text,), _ = render_jinja_template(
        [turn], chat_template=task["template"], add_generation_prompt=True, **task["variables"]
    )
    answer = {"text": text[: task["longest"] + 1]}
except MemoryError:
    answer = {"error": "it asks for more memory than a template may have"}
except BaseException as error:
    answer = {"error": type(error).__name__ + ": " + (str(error).splitlines() or [""])[0][:200]}
print(json.dumps(answer))
"""


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """What stands before and after a user's message, up to where the answer begins."""

    before: str
    after: str

    def around(self, message: str) -> str:
        """The framed message."""
        return f"{self.before}{message}{self.after}"


def frame_of(tokenizer: Any) -> ChatFrame:
    """The frame of a model's chat template; raises ModelError for one that fails, loops or changes what is asked."""
    variables = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # several, and none of them is the default
        raise ModelError(f"The model's default chat template is ambiguous ({error}): {WAY_ON}") from error
    return _frame(template, json.dumps(variables, sort_keys=True))


@functools.lru_cache(maxsize=8)
def _frame(template: str, variables: str) -> ChatFrame:
    task = {"template": template, "variables": json.loads(variables), "message": MESSAGE}
    task |= {"seconds": CPU_SECONDS, "memory": MEMORY, "longest": LONGEST}
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", RENDER],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            timeout=WALL_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"The model's chat template does not terminate: {WAY_ON}") from error
    if done.returncode < 0:
        raise ModelError(f"The model's chat template does not terminate within {CPU_SECONDS} s: {WAY_ON}")
    answer = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {"error": done.stderr.strip()[-200:]}
    if "error" in answer:
        raise ModelError(f"The model's chat template fails ({answer['error']}): {WAY_ON}")
    before, message, after = answer["text"].partition(MESSAGE)
    if not message or len(answer["text"]) > LONGEST or MESSAGE in after:
        raise ModelError(f"The model's chat template alters the message: {WAY_ON}")
    return ChatFrame(before, after)
