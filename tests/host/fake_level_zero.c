/* A stand-in for libze_loader.so.1, built by the tests: enough of ze_api.h for the host probes, over real shared memory.
 *
 * Device memory is a memfd, an IPC handle carries its number, and opening one maps whatever descriptor the number names in the
 * process that opens it. So a handle works in another process only if its descriptor was really moved there.
 *
 * Variables: FAKE_ZE_DEVICES (default 2), FAKE_ZE_PEERS ("all", "none" or "0>1,2>0"), FAKE_ZE_INIT, FAKE_ZE_OPEN and FAKE_ZE_COPY
 * (result codes), FAKE_ZE_CORRUPT, FAKE_ZE_CRASH and FAKE_ZE_HANG (name of a call), FAKE_ZE_ADDRESSES ("03:00.0,07:00.0"),
 * FAKE_ZE_BUILD (of the driver), FAKE_ZE_ID (device id).
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SUCCESS 0u
#define UNINITIALIZED 0x78000001u
#define INVALID_ARGUMENT 0x78000004u
#define MOST 8

typedef uint32_t result;
typedef struct { uint32_t stype; const void *next; } head;
typedef struct { char data[64]; } ipc_handle;
typedef struct { int index; } device;
typedef struct { void *at; size_t size; int fd; int owner; } allocation;

static device devices[MOST];
static int driver_object, context_object[256], list_owner[256], lists, contexts, ready;
static allocation allocations[256];
static int allocated;

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? (int)strtoul(text, NULL, 0) : otherwise;
}

static int count(void) { int n = number("FAKE_ZE_DEVICES", 2); return n > MOST ? MOST : n; }

static void fate(const char *call) {
    const char *crash = getenv("FAKE_ZE_CRASH"), *hang = getenv("FAKE_ZE_HANG");
    if (crash && !strcmp(crash, call)) { fprintf(stderr, "stand-in: crash in %s\n", call); abort(); }
    if (hang && !strcmp(hang, call)) for (;;) pause();
}

static int peers(int a, int b) {
    const char *text = getenv("FAKE_ZE_PEERS");
    char wanted[16];
    if (!text || !strcmp(text, "all")) return 1;
    snprintf(wanted, sizeof wanted, "%d>%d", a, b);
    return strstr(text, wanted) != NULL;
}

static allocation *find(const void *at) {
    for (int i = 0; i < allocated; i++)
        if (allocations[i].at == at) return &allocations[i];
    return NULL;
}

result zeInit(uint32_t flags) {
    (void)flags;
    fate("zeInit");
    uint32_t code = (uint32_t)strtoul(getenv("FAKE_ZE_INIT") ? getenv("FAKE_ZE_INIT") : "0", NULL, 0);
    if (code) return code;
    for (int i = 0; i < MOST; i++) devices[i].index = i;
    ready = 1;
    return SUCCESS;
}

result zeDriverGet(uint32_t *n, void **drivers) {
    if (!ready) return UNINITIALIZED;
    if (drivers && *n) drivers[0] = &driver_object;
    *n = 1;
    return SUCCESS;
}

result zeDriverGetApiVersion(void *driver, uint32_t *version) { (void)driver; *version = (1u << 16) | 12u; return SUCCESS; }

struct driver_properties { head h; uint8_t uuid[16]; uint32_t version; };
result zeDriverGetProperties(void *driver, struct driver_properties *p) {
    (void)driver;
    if (p->h.stype != 0x1) return INVALID_ARGUMENT;
    p->version = (1u << 24) | (15u << 16) | (uint32_t)number("FAKE_ZE_BUILD", 38308);
    return SUCCESS;
}

struct flags_only { head h; uint32_t flags; };
result zeDriverGetIpcProperties(void *driver, struct flags_only *p) {
    (void)driver;
    if (p->h.stype != 0x2) return INVALID_ARGUMENT;
    p->flags = 1;
    return SUCCESS;
}

result zeDeviceGet(void *driver, uint32_t *n, void **found) {
    (void)driver;
    const char *mask = getenv("ZE_AFFINITY_MASK");
    int have = 0;
    for (int i = 0; i < count(); i++) {
        char digit[2] = {(char)('0' + i), 0};
        if (mask && *mask && !strstr(mask, digit)) continue;
        if (found && have < (int)*n) found[have] = &devices[i];
        have++;
    }
    *n = (uint32_t)have;
    return SUCCESS;
}

struct device_properties {
    head h; uint32_t type, vendor, id, flags, subdevice, clock; uint64_t most; uint32_t contexts, priority, threads, width, eus,
    subslices, slices; uint64_t timer; uint32_t valid, kernel_valid; uint8_t uuid[16]; char name[256];
};
result zeDeviceGetProperties(device *d, struct device_properties *p) {
    if (p->h.stype != 0x3) return INVALID_ARGUMENT;
    p->type = 1;
    p->vendor = 0x8086;
    p->id = (uint32_t)number("FAKE_ZE_ID", 0xe211);
    p->flags = 0;
    snprintf(p->name, sizeof p->name, "Stand-in GPU %d", d->index);
    return SUCCESS;
}

struct pci_properties { head h; uint32_t domain, bus, device, function; int32_t generation, width; int64_t bandwidth; };
result zeDevicePciGetPropertiesExt(device *d, struct pci_properties *p) {
    const char *text = getenv("FAKE_ZE_ADDRESSES");
    if (p->h.stype != 0x10008) return INVALID_ARGUMENT;
    p->domain = 0, p->bus = 3 + 4 * (uint32_t)d->index, p->device = 0, p->function = 0;
    for (int i = 0; text && i < d->index; i++) text = strchr(text, ',') ? strchr(text, ',') + 1 : NULL;
    if (text) sscanf(text, "%x:%x.%x", &p->bus, &p->device, &p->function);
    return SUCCESS;
}

struct memory_properties { head h; uint32_t flags, clock, width; uint64_t size; char name[256]; };
result zeDeviceGetMemoryProperties(device *d, uint32_t *n, struct memory_properties *p) {
    (void)d;
    if (p && *n) {
        if (p[0].h.stype != 0x7) return INVALID_ARGUMENT;
        p[0].size = 24ull << 30;
    }
    *n = 1;
    return SUCCESS;
}

result zeDeviceCanAccessPeer(device *a, device *b, uint8_t *value) {
    fate("zeDeviceCanAccessPeer");
    *value = (uint8_t)peers(a->index, b->index);
    return SUCCESS;
}

result zeDeviceGetP2PProperties(device *a, device *b, struct flags_only *p) {
    if (p->h.stype != 0xb) return INVALID_ARGUMENT;
    p->flags = peers(a->index, b->index) ? 1u : 0u;
    return SUCCESS;
}

result zeContextCreate(void *driver, const head *desc, void **context) {
    (void)driver;
    if (desc->stype != 0xd) return INVALID_ARGUMENT;
    *context = &context_object[contexts++ % 256];
    return SUCCESS;
}

struct queue_desc { head h; uint32_t ordinal, index, flags, mode, priority; };
result zeCommandListCreateImmediate(void *context, device *d, const struct queue_desc *desc, void **list) {
    (void)context;
    if (desc->h.stype != 0xe || desc->mode != 1) return INVALID_ARGUMENT;
    list_owner[lists] = d->index;
    *list = &list_owner[lists++];
    return SUCCESS;
}

static result keep(int fd, size_t size, int owner, void **at) {
    *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (*at == MAP_FAILED) return INVALID_ARGUMENT;
    allocations[allocated++] = (allocation){*at, size, fd, owner};
    return SUCCESS;
}

result zeMemAllocDevice(void *context, const head *desc, size_t size, size_t alignment, device *d, void **at) {
    (void)context, (void)alignment;
    fate("zeMemAllocDevice");
    if (desc->stype != 0x15) return INVALID_ARGUMENT;
    int fd = memfd_create("stand-in", 0);
    if (fd < 0 || ftruncate(fd, (off_t)size)) return 0x70000003u;
    return keep(fd, size, d->index, at);
}

result zeMemFree(void *context, void *at) { (void)context, (void)at; return SUCCESS; }

result zeMemGetIpcHandle(void *context, const void *at, ipc_handle *handle) {
    (void)context;
    fate("zeMemGetIpcHandle");
    allocation *a = find(at);
    if (!a) return INVALID_ARGUMENT;
    memset(handle, 0, sizeof *handle);
    memcpy(handle->data, &a->fd, sizeof a->fd);
    memcpy(handle->data + 8, &a->size, sizeof a->size);
    memcpy(handle->data + 16, &a->owner, sizeof a->owner);
    return SUCCESS;
}

result zeMemOpenIpcHandle(void *context, device *d, ipc_handle handle, uint32_t flags, void **at) {
    (void)context, (void)d, (void)flags;
    int fd, owner;
    size_t size;
    struct stat seen;
    fate("zeMemOpenIpcHandle");
    uint32_t code = (uint32_t)strtoul(getenv("FAKE_ZE_OPEN") ? getenv("FAKE_ZE_OPEN") : "0", NULL, 0);
    if (code) return code;
    memcpy(&fd, handle.data, sizeof fd);
    memcpy(&size, handle.data + 8, sizeof size);
    memcpy(&owner, handle.data + 16, sizeof owner);
    if (fstat(fd, &seen) || (size_t)seen.st_size != size) return INVALID_ARGUMENT;
    return keep(fd, size, owner, at);
}

result zeMemCloseIpcHandle(void *context, const void *at) { (void)context, (void)at; return SUCCESS; }

result zeCommandListAppendMemoryCopy(int *list, void *target, const void *source, size_t size, void *event, uint32_t n, void **waits) {
    (void)event, (void)n, (void)waits;
    allocation *from = find(source);
    int across = from && from->owner != *list;
    if (across) {
        fate("peer copy");
        uint32_t code = (uint32_t)strtoul(getenv("FAKE_ZE_COPY") ? getenv("FAKE_ZE_COPY") : "0", NULL, 0);
        if (code) return code;
    }
    memcpy(target, source, size);
    if (across && getenv("FAKE_ZE_CORRUPT")) memset(target, 0xff, size);
    return SUCCESS;
}
