"""An agent that adds: it asks a model, and once more if no number came. It knows of no training."""

import json
import os
import re
import sys
import urllib.request


def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "any", "messages": messages}).encode(),
        {
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]


messages = [{"role": "user", "content": f"{sys.argv[1]} = ? Answer with the number only."}]
for _ in range(2):
    answer = ask(messages)
    numbers = re.findall(r"\d+", answer["content"])
    if numbers:
        print(numbers[-1])
        break
    messages += [answer, {"role": "user", "content": "Write the number."}]
