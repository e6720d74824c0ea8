"""A folder that can stop to answer, as a network mount does: a small read-only FUSE file system over another folder.

    python tests/helpers/stalling.py FOLDER OVER STALL

mounts over FOLDER what lies in OVER, without its subfolders. While the file STALL exists, reads and opens hang. Needs
root and /dev/fuse. Requests and replies: linux/fuse.h, protocol 7.31.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
import time
from pathlib import Path

LOOKUP, FORGET, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR = (
    1,
    2,
    3,
    14,
    15,
    18,
    25,
    26,
    27,
    28,
    29,
)
INTERRUPT, BATCH_FORGET = 36, 42
ENOENT, ENOSYS = 2, 38
HEADER = struct.Struct("<IIQQIIII")


class Mount:
    def __init__(self, folder: Path, over: Path, stall: Path) -> None:
        self.over, self.stall = over, stall
        self.device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self.device},rootmode=40000,user_id=0,group_id=0,allow_other"
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"stalling", os.fsencode(folder), b"fuse", 1 | 2 | 4, options.encode()):
            raise OSError(ctypes.get_errno(), "mount")
        self.names = sorted(path.name for path in over.iterdir() if path.is_file())

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self.device, 1 << 20)
            except OSError:
                return  # unmounted
            threading.Thread(target=self.answer, args=(request,), daemon=True).start()

    def answer(self, request: bytes) -> None:
        _, opcode, unique, node, *_ = HEADER.unpack_from(request)
        body = request[HEADER.size :]
        if opcode in (OPEN, READ):
            while self.stall.exists():
                time.sleep(0.01)
        if opcode in (FORGET, BATCH_FORGET, INTERRUPT):
            return
        try:
            data, error = self.reply(opcode, node, body), 0
        except OSError as failed:
            data, error = b"", failed.errno or ENOSYS
        os.write(self.device, struct.pack("<IiQ", 16 + len(data), -error, unique) + data)

    def reply(self, opcode: int, node: int, body: bytes) -> bytes:
        if opcode == INIT:
            return struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 17, 0, 12, 10, 1 << 17, 1, 32, 0, 0)
        if opcode == LOOKUP:
            name = body.rstrip(b"\0").decode()
            if name not in self.names:
                raise OSError(ENOENT, name)
            found = self.names.index(name) + 2
            return struct.pack("<QQQQII", found, 0, 3600, 3600, 0, 0) + self.attributes(found)
        if opcode == GETATTR:
            return struct.pack("<QII", 3600, 0, 0) + self.attributes(node)
        if opcode in (OPEN, OPENDIR):
            return struct.pack("<QII", 0, 0, 0)
        if opcode == READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            with self.path(node).open("rb") as file:
                return os.pread(file.fileno(), size, offset)
        if opcode in (RELEASE, RELEASEDIR, FLUSH, READDIR):
            return b""
        raise OSError(ENOSYS, "")

    def path(self, node: int) -> Path:
        return self.over if node == 1 else self.over / self.names[node - 2]

    def attributes(self, node: int) -> bytes:
        of = self.path(node).stat()
        return struct.pack(
            "<QQQQQQIIIIIIIIII",
            node,
            of.st_size,
            of.st_blocks,
            int(of.st_atime),
            int(of.st_mtime),
            int(of.st_ctime),
            0,
            0,
            0,
            of.st_mode,
            of.st_nlink,
            0,
            0,
            0,
            4096,
            0,
        )


if __name__ == "__main__":
    mount = Mount(*map(Path, sys.argv[1:]))
    print("mounted", flush=True)
    mount.serve()
