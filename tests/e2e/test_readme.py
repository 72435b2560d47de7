"""What the README shows for the endpoint, run as it stands there but for the address."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import TIMEOUT_S, Kvnet
from tests.mlx.tinymodels import LLAMA, write_model

pytestmark = [pytest.mark.e2e, pytest.mark.loopback, pytest.mark.mlx, pytest.mark.docs]

README = (Path(__file__).parent.parent.parent / "README.md").read_text()
ADDRESS = "http://127.0.0.1:5863"


def test_the_curl_and_the_openai_example_of_the_readme_are_answered(kvnet: Kvnet) -> None:
    write_model(kvnet.data_dir / "models" / "tiny", {**LLAMA, "max_position_embeddings": 2048})
    kvnet.start("--model", "tiny")
    (url,) = kvnet.json("node", "status")["endpoint"]

    (curl,) = re.findall(r"^curl .*?\}'$", README, re.MULTILINE | re.DOTALL)
    assert ADDRESS in curl
    # The answer of a random model need not end by itself.
    shown = curl.replace(ADDRESS, url).replace('{"messages"', '{"max_tokens": 8, "messages"')
    done = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"

    (example,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert ADDRESS in example
    code = example.replace(ADDRESS, url).replace("model=names[0],", "model=names[0], max_tokens=8,")
    code += "\nprint(answer.choices[0].message.role)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    assert done.stdout == "assistant\n"
