"""A network between hosts of one machine: a TUN device in each host's network namespace, and a thread that carries
packets from one to another. It can cut the link of a host and restore it."""
import collections
import ctypes
import errno
import fcntl
import os
import selectors
import struct
import threading

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
        self.bytes = collections.Counter()  # by the address they went to


class Network:
    """Addresses are those of IPv4, as 4 bytes."""
    def __init__(self, devices):
        self.links = {address: Link(file, address) for address, file in devices.items()}
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
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    self._take(key.data)

    def _take(self, link):
        for _ in range(64):  # then the others' turn
            try:
                packet = os.read(link.file, 65536)
            except BlockingIOError:
                return
            to = packet[16:20]
            if packet[0] >> 4 == 4 and to in self.links and link.up:
                link.bytes[to] += len(packet)
                self._deliver(to, packet)

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
