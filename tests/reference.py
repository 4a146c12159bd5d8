"""Values that the tests hold the product against, with their source in the file."""

import json
from pathlib import Path
from typing import Any

FORMATS: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "formats.json").read_text("utf-8"))
