"""Slabs: anonymous shared memory that the server owns and engines map.

A slab is a memfd: it has no name, so a crash leaves nothing behind, and it lives as long as the
server or an engine holds it. Its pages are touched when it is made, so that they are charged to
the server's control group and no copy runs at page-fault speed. Making one blocks for its size ÷
a few GB/s: do it in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from dataclasses import dataclass
from enum import StrEnum

from ..errors import StartError

HUGE_PAGE_BYTES = 2 << 20


class HugePages(StrEnum):
    """Whether slabs lie in huge pages: if there are enough, or not started otherwise, or never."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Slab:
    """One piece of shared memory of `size` bytes behind descriptor `fd`."""

    number: int
    fd: int
    size: int
    huge: bool

    def kernel_bytes(self) -> int:
        """Return the memory that the kernel has given to this slab."""
        return os.fstat(self.fd).st_blocks * 512

    def map(self) -> memoryview:
        """Return the memory, page-aligned; it stays mapped while anything refers to it."""
        return memoryview(mmap.mmap(self.fd, self.size))

    def give_up(self) -> None:
        """Give the pages back to the kernel, whoever maps them: what is read then is zeros."""
        mapped = mmap.mmap(self.fd, self.size)
        mapped.madvise(mmap.MADV_REMOVE)
        mapped.close()

    def close(self) -> None:
        """Let go of the memory; engines that mapped it keep it until they unmap."""
        os.close(self.fd)


def make_slab(number: int, size: int, pages: HugePages) -> Slab:
    """Make a slab and touch its pages. Blocks. Raises StartError when memory does not suffice."""
    if pages is not HugePages.NEVER:
        with contextlib.suppress(OSError):
            return Slab(number, _memfd(number, size, os.MFD_HUGETLB), size, huge=True)
        if pages is HugePages.ALWAYS:
            raise StartError(
                f"host.huge_pages is always, but the kernel has no {size >> 20} MiB of free huge "
                f"pages: raise vm.nr_hugepages or set host.huge_pages to auto"
            )
    try:
        return Slab(number, _memfd(number, size, 0), size, huge=False)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        raise StartError(
            f"the kernel refused {size >> 20} MiB of shared memory for slab {number}: "
            f"lower host.capacity or free memory"
        ) from error


def _memfd(number: int, size: int, flags: int) -> int:
    fd = os.memfd_create(f"kvtier-slab-{number}", os.MFD_CLOEXEC | flags)
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
    except BaseException:
        os.close(fd)
        raise
    return fd
