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
LOCK, MARK = ".lock", ".fetched.json"
"""What is of one place only: who has the run there, and what was brought there."""
RECORDS = "metrics.jsonl", "per_client.csv"
TRIES = 20
"""How often checkpoints are looked for, when some go while they are read."""


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


def first(folder):
    """The SHA-256 of the first line of a run's records, by which runs are told apart; empty where there is none."""
    path = os.path.join(folder, RECORDS[0])
    if not os.path.isfile(path):
        return ""
    with open(path, "rb") as stream:
        line = stream.readline()
    return hashlib.sha256(line).hexdigest() if line.endswith(b"\n") else ""


def read(path):
    """The contents of a file and when it was changed; None where it is no plain file, FileNotFoundError if it went."""
    if os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path)):
        return None
    with open(path, "rb") as stream:
        return stream.read(), int(os.fstat(stream.fileno()).st_mtime)


def checkpoint(folder):
    """The files of a checkpoint by name, meta.json last; FileNotFoundError if it goes, or another takes its place."""
    before = os.stat(folder).st_ino
    names = sorted(os.listdir(folder), key=lambda name: (name == "meta.json", name))
    files = [(name, read(os.path.join(folder, name))) for name in names]
    if os.stat(folder).st_ino != before:
        raise FileNotFoundError(folder)
    return [(name, found) for name, found in files if found]


def add(archive, name, found):
    """Add a file."""
    content, changed = found
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = len(content), changed, 0o644
    archive.addfile(entry, io.BytesIO(content))


def add_checkpoints(archive, name, folder):
    """Add the checkpoints that are whole; where one goes while it is read there is a newer one, so look again."""
    added = set()
    for _ in range(TRIES):
        lost = False
        for last in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
            path = os.path.join(folder, last)
            if last in added or last.startswith(".") or os.path.islink(path) or os.path.isfile(path):
                continue
            try:
                files = checkpoint(path)
            except FileNotFoundError:
                lost = True
                continue
            added.add(last)
            for file, found in files:
                add(archive, os.path.join(name, last, file), found)
        if not lost:
            return


def pack(archive, name, folder, checkpoints):
    """Add a run folder as it is now: a run may be writing to it, and files may go while this looks.

    What arrives can be taken up: checkpoints are read before the records, which must have all their rounds, and what
    says whether the run is complete before both.
    """
    done = set()

    def bring(file):
        try:
            found = None if file in done else read(os.path.join(folder, file))
        except FileNotFoundError:
            return
        done.add(file)
        if found:
            add(archive, os.path.join(name, file), found)

    bring("summary.json")
    done.add("summary.json")  # one that comes later is of rounds that may not be in what was read
    if checkpoints:
        add_checkpoints(archive, os.path.join(name, "checkpoints"), os.path.join(folder, "checkpoints"))
    for file in RECORDS:
        bring(file)
    for at, below, files in os.walk(folder):
        inside = os.path.relpath(at, folder)
        if inside == ".":
            below[:] = [one for one in below if one not in ("checkpoints", ".mirror")]
        below.sort()
        for file in sorted(files):
            if file not in (LOCK, MARK):
                bring(os.path.normpath(os.path.join(inside, file)))


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
        head = {"sha256": digest.hexdigest(), "bytes": size, "runs": list(new), "home": home}
        head["all"] = {name: first(folder) for name, folder in found.items()}
        print(BEGIN, json.dumps(head), flush=True)
        stream.seek(0)
        for block in iter(lambda: stream.read(LINE), b""):
            sys.stdout.write(base64.b64encode(block).decode() + "\n")
        print(END, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
