/* SPDX-License-Identifier: Apache-2.0
 *
 * An external driver in C, without a library: a fictitious crypto card that is prepared, released and
 * measured. Build and run:
 *
 *     cc -O2 -Wall -Wextra -o driver driver.c
 *     ./driver /run/cyborg-drivers crypto
 *
 * It listens at <folder>/<name>.sock, sends a hello to <folder>/agent.sock, and serves one call at a
 * time. It repeats the hello every few seconds, because a restarted agent does not know its drivers.
 * Implement the real work at the comments REAL WORK.
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MAX_REQUEST = 128 * 1024, MAX_PREPARED = 16, HELLO_SECONDS = 5, CALL_SECONDS = 5 };

static const char HARDWARE[] =
    "{\"hardware\": [{"
    "\"uuid\": \"5f0d6f3c-6a8e-4a39-9b7a-0d5f6f3c6a8e\","
    "\"acc_specs\": {\"remote\": 0, \"num\": 4, \"device_type\": \"CRYPTO\","
    "  \"acc_capability\": {\"num\": 4, \"ipsec\": {\"aes\": {\"3des\": 50, \"num\": 1}}}},"
    "\"acc_status\": {\"setup_required\": false, \"reboot_equired\": false},"
    /* TEST_PCI: Nova ignores these handles. A real card omits attach_type. */
    "\"attach_type\": \"TEST_PCI\","
    "\"address\": \"0000:5a:00.0\", \"vendor_id\": \"1af4\", \"product_id\": \"1054\","
    "\"numa_node\": 0, \"serial\": \"C-0001\", \"health\": \"ok\"}]}";

static char prepared[MAX_PREPARED][121];
static int discoveries;
static volatile sig_atomic_t stopped;

static void stop(int number) { (void)number; stopped = 1; }

/* A peer that stops within a message must not block the driver. */
static void limit(int link)
{
    struct timeval patience = { .tv_sec = CALL_SECONDS };
    setsockopt(link, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(link, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
}

static int place(struct sockaddr_un *where, const char *folder, const char *name)
{
    memset(where, 0, sizeof *where);
    where->sun_family = AF_UNIX;
    int size = snprintf(where->sun_path, sizeof where->sun_path, "%s/%s.sock", folder, name);
    return size > 0 && (size_t)size < sizeof where->sun_path ? 0 : -1;
}

static int send_all(int link, const char *data, size_t size)
{
    while (size > 0) {
        ssize_t sent = send(link, data, size, MSG_NOSIGNAL);
        if (sent <= 0)
            return -1;
        data += sent;
        size -= (size_t)sent;
    }
    return 0;
}

static void answer(int link, int status, const char *body)
{
    char head[160];
    int size = snprintf(head, sizeof head,
                        "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\n"
                        "Content-Length: %zu\r\nConnection: close\r\n\r\n",
                        status, status == 200 ? "OK" : "Error", strlen(body));
    if (send_all(link, head, (size_t)size) == 0)
        send_all(link, body, strlen(body));
}

/* Send a hello; return the HTTP status of the agent, 0 if it is unreachable. */
static int hello(const char *folder, const char *own)
{
    struct sockaddr_un agent;
    char body[320], head[480], told[512];
    int status = 0, link = socket(AF_UNIX, SOCK_STREAM, 0);
    if (link < 0)
        return 0;
    limit(link);
    snprintf(body, sizeof body,
             "{\"status\": \"READY\", \"endpoint\": \"%s\", \"type\": \"CRYPTO\","
             " \"abilities\": [\"prepare\", \"release\", \"health\"]}", own);
    int size = snprintf(head, sizeof head,
                        "POST /hello HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                        "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                        strlen(body), body);
    if (place(&agent, folder, "agent") == 0 &&
        connect(link, (struct sockaddr *)&agent, sizeof agent) == 0 &&
        send_all(link, head, (size_t)size) == 0) {
        ssize_t got = recv(link, told, sizeof told - 1, 0);
        if (got > 0) {
            told[got] = '\0';
            sscanf(told, "HTTP/%*s %d", &status);
        }
    }
    close(link);
    return status;
}

/* Copy the value of "handle" in the item; return 0 if present. A real driver parses JSON. */
static int handle_of(const char *body, char *handle, size_t room)
{
    const char *at = strstr(body, "\"handle\": \"");
    if (at == NULL)
        return -1;
    at += strlen("\"handle\": \"");
    size_t size = strcspn(at, "\"");
    if (size == 0 || size >= room || at[size] != '"')
        return -1;
    memcpy(handle, at, size);
    handle[size] = '\0';
    return 0;
}

/* Idempotent: a prepared handle stays prepared, an unprepared one counts as released. */
static int work(const char *handle, int prepare)
{
    char *room = NULL;
    for (int n = 0; n < MAX_PREPARED; n++) {
        if (strcmp(prepared[n], handle) == 0) {
            if (!prepare)
                prepared[n][0] = '\0'; /* REAL WORK: clean the function up */
            return 0;
        }
        if (prepared[n][0] == '\0' && room == NULL)
            room = prepared[n];
    }
    if (!prepare)
        return 0;
    if (room == NULL)
        return -1;
    strcpy(room, handle); /* REAL WORK: set the function up. Both fit: see handle_of. */
    return 0;
}

static void serve(int link, char *request, const char *body)
{
    char method[8] = "", target[32] = "", handle[sizeof prepared[0]], told[160];
    sscanf(request, "%7s %31s", method, target);
    int post = strcmp(method, "POST") == 0, get = strcmp(method, "GET") == 0;
    if (post && strcmp(target, "/discovery") == 0) {
        /* REAL WORK: start the discovery and the setup of devices. Do not wait here. */
        snprintf(told, sizeof told,
                 "{\"status\": \"IN-PROGRESS\", \"discovery_id\": \"%d\"}", ++discoveries);
        answer(link, 200, told);
    } else if (get && strcmp(target, "/hardware") == 0) {
        answer(link, 200, HARDWARE); /* REAL WORK: the current hardware */
    } else if (get && strcmp(target, "/health") == 0) {
        answer(link, 200,
               "{\"health\": {\"0000:5a:00.0\": {\"health\": \"ok\", \"reason\": null}}}");
    } else if (post && (strcmp(target, "/prepare") == 0 || strcmp(target, "/release") == 0)) {
        int prepare = strcmp(target, "/prepare") == 0;
        if (handle_of(body, handle, sizeof handle) != 0)
            answer(link, 400, "{\"error\": \"the item names no handle\"}");
        else if (work(handle, prepare) != 0)
            answer(link, 409, "{\"error\": \"the card is full\"}");
        else {
            printf("%s %s\n", prepare ? "prepared" : "released", handle);
            answer(link, 200, "{\"status\": \"DONE\"}");
        }
    } else {
        answer(link, 404, "{\"error\": \"there is no such call\"}");
    }
}

/* Read one complete request and serve it. */
static void take(int link)
{
    static char request[MAX_REQUEST + 1];
    size_t got = 0, want = 0;
    char *body = NULL;
    limit(link);
    while (body == NULL || got < want) {
        ssize_t more = recv(link, request + got, MAX_REQUEST - got, 0);
        if (more <= 0)
            return;
        got += (size_t)more;
        request[got] = '\0';
        if (body == NULL && (body = strstr(request, "\r\n\r\n")) != NULL) {
            *body = '\0'; /* only the head, to parse its length */
            body += 4;
            want = (size_t)(body - request);
            for (char *line = request; line != NULL; line = strchr(line, '\n')) {
                line += *line == '\n';
                if (strncasecmp(line, "Content-Length:", 15) == 0) {
                    unsigned long size = strtoul(line + 15, NULL, 10);
                    want += size > MAX_REQUEST ? MAX_REQUEST : size;
                }
            }
        }
        if (want > MAX_REQUEST || (got == MAX_REQUEST && got < want)) {
            answer(link, 413, "{\"error\": \"too long\"}");
            return;
        }
    }
    serve(link, request, body);
}

int main(int count, char **words)
{
    struct sockaddr_un own;
    struct sigaction act = { .sa_handler = stop };
    if (count != 3 || place(&own, words[1], words[2]) != 0) {
        fprintf(stderr, "usage: driver FOLDER NAME\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    sigaction(SIGTERM, &act, NULL);
    sigaction(SIGINT, &act, NULL);
    umask(0077);
    unlink(own.sun_path);
    int door = socket(AF_UNIX, SOCK_STREAM, 0);
    if (door < 0 || bind(door, (struct sockaddr *)&own, sizeof own) != 0 || listen(door, 16) != 0) {
        fprintf(stderr, "driver: cannot listen at %s: %s\n", own.sun_path, strerror(errno));
        return 1;
    }
    time_t again = 0;
    while (!stopped) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec >= again) {
            int status = hello(words[1], own.sun_path);
            if (status != 200)
                printf("hello: %d\n", status);
            again = now.tv_sec + (status == 200 ? HELLO_SECONDS : 1);
        }
        struct pollfd ready = { .fd = door, .events = POLLIN };
        if (poll(&ready, 1, 1000) > 0) {
            int link = accept(door, NULL, NULL);
            if (link >= 0) {
                take(link);
                close(link);
            }
        }
    }
    unlink(own.sun_path);
    return 0;
}
