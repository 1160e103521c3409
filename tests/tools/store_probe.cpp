// A rank that prints the socket of TESSERA_STORE_FD.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>

int main() {
  const char* number = std::getenv("TESSERA_STORE_FD");
  if (number == nullptr) {
    std::puts("store=none");
    return 0;
  }
  const int fd = std::atoi(number);
  int listening = 0;
  socklen_t size = sizeof listening;
  getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size);
  sockaddr_in address{};
  size = sizeof address;
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  std::printf("store=%s:%d\nlistening=%d\nport=%s\n", inet_ntoa(address.sin_addr),
              ntohs(address.sin_port), listening, std::getenv("MASTER_PORT"));
}
