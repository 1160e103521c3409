"""A network between hosts of one machine: a TUN device in each host's network namespace, and a thread that carries
packets from one to another. It can delay them, lose some, slow the link of a host, cut it and restore it. By a thread
and not by the kernel's netem, which many kernels are built without; and a packet's fate is drawn from a seed."""
import collections
import ctypes
import errno
import fcntl
import heapq
import itertools
import os
import random
import selectors
import struct
import threading
import time

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 1, 0x1000
libc = ctypes.CDLL(None, use_errno=True)


def enter(namespace):
    """The calling thread's network namespace becomes that of a file of /proc."""
    with open(namespace, "rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), namespace)


def open_device(namespace, name):
    """A new TUN device of that namespace: what its host sends is read from the file."""
    opened = []

    def work():
        try:
            enter(namespace)
            file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
            opened.append(file)
        except OSError as error:
            opened.append(error)

    thread = threading.Thread(target=work)  # a thread's namespace goes with it
    thread.start()
    thread.join()
    if isinstance(opened[0], OSError):
        raise opened[0]
    return opened[0]


class Link:
    """From a host to the others."""
    def __init__(self, file, address):
        self.file = file
        self.address = address
        self.up = True
        self.free_at = 0.0  # when what it sends now begins to travel
        self.bytes = collections.Counter()  # by the address they went to


class Network:
    """Addresses are those of IPv4, as 4 bytes. Settings may change while packets travel."""
    def __init__(self, devices, seed=0):
        self.links = {address: Link(file, address) for address, file in devices.items()}
        self.delay = 0.0  # seconds
        self.loss = 0.0  # of each packet, from 0 to 1
        self.rate = float("inf")  # bytes a second of each link
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._due = []  # (time, number, address, packet)
        self._ended, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self):
        os.close(self._wake)
        self._thread.join()
        os.close(self._ended)
        for link in self.links.values():
            os.close(link.file)

    def cut(self, address):
        """No packet comes from this host or gets there; nobody is told."""
        self.links[address].up = False

    def restore(self, address):
        self.links[address].up = True

    def bytes_sent(self):
        return sum(sum(link.bytes.values()) for link in self.links.values())

    def _run(self):
        with selectors.DefaultSelector() as selector:
            selector.register(self._ended, selectors.EVENT_READ)
            for link in self.links.values():
                selector.register(link.file, selectors.EVENT_READ, link)
            while True:
                wait = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
                for key, _ in selector.select(wait):
                    if key.data is None:
                        return
                    self._take(key.data)
                while self._due and self._due[0][0] <= time.monotonic():
                    _, _, address, packet = heapq.heappop(self._due)
                    self._deliver(address, packet)

    def _take(self, link):
        for _ in range(64):  # then the others' turn
            try:
                packet = os.read(link.file, 65536)
            except BlockingIOError:
                return
            to = packet[16:20]
            if packet[0] >> 4 != 4 or to not in self.links or not link.up or self._random.random() < self.loss:
                continue
            link.bytes[to] += len(packet)
            now = time.monotonic()
            link.free_at = max(now, link.free_at) + len(packet) / self.rate
            due = link.free_at + self.delay
            if due <= now:
                self._deliver(to, packet)
            else:
                heapq.heappush(self._due, (due, next(self._numbers), to, packet))

    def _deliver(self, address, packet):
        link = self.links[address]
        if not link.up:
            return
        try:
            os.write(link.file, packet)
        except OSError as error:
            # A host that has ended, or whose queue is full, loses packets as any would.
            if error.errno not in (errno.EIO, errno.EAGAIN, errno.EBADFD):
                raise
