"""Make the pictures of reports that results/h200 shows: python scripts/page_pictures.py [NAME ...]

Each is the top of the page that `trainstep report results/h200/NAME.jsonl --format html` writes, taken by a
headless Chromium. With names it makes those alone. The virtual environment's Python runs it: it needs trainstep.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from trainstep.report.kit.rows import read_rows
from trainstep.report.page import page

RECORDS = Path(__file__).resolve().parent.parent / "results" / "h200"
HEIGHTS = {
    **dict.fromkeys(("end_to_end", "profile", "memory", "memory_sizes", "flash", "ddp_xl", "numerics"), 1600),
    "attention_hopper": 1900,
}
"""Records -> pixels of the page from its top: to the end of the first charts."""
WIDTH = 1400
MOST_BYTES = 300_000
"""The most that a picture may take in the repository."""
_CHARTS_MS = 30_000
"""Milliseconds of the page's own clock in which its charts are drawn; it stands still while nothing is to be done."""


def main(names: list[str]) -> None:
    """Make the pictures named, or all. SystemExit in one sentence where there is no Chromium or a picture is too large."""
    found = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    chromium = next(found, None)
    if chromium is None:
        raise SystemExit("page_pictures: needs chromium on the PATH; install it")
    if unknown := [name for name in names if name not in HEIGHTS]:
        raise SystemExit(f"page_pictures: knows no {unknown[0]}; it makes {', '.join(HEIGHTS)}")
    for name in names or HEIGHTS:
        picture = RECORDS / f"{name}.png"
        take(chromium, page(read_rows([RECORDS / f"{name}.jsonl"])), HEIGHTS[name], picture)
        print(f"{picture.name}: {picture.stat().st_size:,} bytes", flush=True)
        if picture.stat().st_size > MOST_BYTES:
            raise SystemExit(f"page_pictures: {picture.name} takes more than {MOST_BYTES:,} bytes; make it smaller")


def take(chromium: str, html: str, height: int, picture: Path) -> None:
    """Write the top of a page as a PNG. CalledProcessError where Chromium fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(html, encoding="utf-8")
        flags = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
        )
        size, clock = f"--window-size={WIDTH},{height}", f"--virtual-time-budget={_CHARTS_MS}"
        command = [chromium, *flags, size, clock, f"--screenshot={picture}", file.as_uri()]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=300)


if __name__ == "__main__":
    main(sys.argv[1:])
