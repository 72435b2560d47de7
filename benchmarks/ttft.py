"""Time to first token: cold, from a peer, from disk; the demo, with its figures taken from its result line."""

import json
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Run the demo and print its times and ratios."""
    kvnet = Path(sys.executable).with_name("kvnet")
    done = subprocess.run([kvnet, "demo", "--json"], stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    cold, peer, disk = (result[f"{which}_ttft_s"] for which in ("cold", "peer", "disk"))
    print(f"\ntime to first token, {result['prefix_tokens']:,} tokens of shared prefix, two nodes on loopback")
    print(f"  {'cold, prefilled here':44} {cold:8.3f} s    1.00x")
    print(f"  {'from a peer':44} {peer:8.3f} s  {cold / peer:6.2f}x faster than cold")
    print(f"  {'from the own disk':44} {disk:8.3f} s  {cold / disk:6.2f}x faster than cold")
    print(f"  from a peer takes {peer / disk:.2f} times as long as from disk")
