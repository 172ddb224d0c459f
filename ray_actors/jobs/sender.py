"""Runs on a machine of the cluster, as the text of a job: prints run folders as an archive between two marks.

It may use nothing but Python's own library: neither pflsim nor Ray need be found where it runs.
"""

import base64
import hashlib
import io
import json
import os
import sys
import tarfile
import tempfile

BEGIN, END, ERROR = "pflsim-fetch-begin", "pflsim-fetch-end", "pflsim-fetch-error"
LINE = 3 * 1024
"""Bytes of the archive in a line of base64."""


def run_folders(home, elsewhere):
    """Run folders below the home, and those that the run was told to make, by the name that they get."""
    found = []
    for folder, below, files in os.walk(home):
        below.sort()
        if "config.yaml" in files and os.path.getsize(os.path.join(folder, "config.yaml")):
            below.clear()
            found.append(folder)
    for folder in elsewhere:
        path = os.path.normpath(os.path.join(home, folder))
        if path not in found and os.path.isfile(os.path.join(path, "config.yaml")):
            found.append(path)
    named = {}
    for folder in found:
        name = os.path.relpath(folder, home)
        name = name[len("runs/") :] if name.startswith("runs/") else name
        name = os.path.basename(folder) if name.startswith("..") or name == "." else name
        while name in named:
            name += "-2"
        named[name] = folder
    return named


def pack(archive, name, folder, checkpoints):
    """Add a run folder as it is now: a run may be writing to it, and files may go while this looks."""
    for at, below, files in os.walk(folder):
        if not checkpoints and "checkpoints" in below:
            below.remove("checkpoints")
        below.sort()
        for file in sorted(files):
            path = os.path.join(at, file)
            if file == ".lock" or os.path.islink(path) or not os.path.isfile(path):
                continue
            try:
                with open(path, "rb") as stream:
                    content = stream.read()
                    changed = os.fstat(stream.fileno()).st_mtime
            except FileNotFoundError:
                continue
            entry = tarfile.TarInfo(os.path.join(name, os.path.relpath(path, folder)))
            entry.size, entry.mtime, entry.mode = len(content), int(changed), 0o644
            archive.addfile(entry, io.BytesIO(content))


def main(asked):
    """Print what is asked for, or why it cannot be."""
    home = os.path.expanduser(asked["home"])
    found = run_folders(home, asked["elsewhere"])
    new = {name: folder for name, folder in found.items() if name not in asked["have"]}
    with tempfile.TemporaryFile() as stream:
        with tarfile.open(fileobj=stream, mode="w:gz") as archive:
            for name, folder in new.items():
                pack(archive, name, folder, asked["checkpoints"])
        size = stream.tell()
        if size > asked["limit"]:
            print(ERROR, json.dumps({"bytes": size, "home": home, "runs": list(new)}), flush=True)
            return
        stream.seek(0)
        digest = hashlib.sha256()
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
        head = {"sha256": digest.hexdigest(), "bytes": size, "runs": list(new), "all": list(found), "home": home}
        print(BEGIN, json.dumps(head), flush=True)
        stream.seek(0)
        for block in iter(lambda: stream.read(LINE), b""):
            sys.stdout.write(base64.b64encode(block).decode() + "\n")
        print(END, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
