/* SPDX-License-Identifier: Apache-2.0 */
/* A double of libnvfm.so.1 with a Fabric Manager whose state is a file.
 *
 * The address of the connection is the path of that file, or "host:port" for the file of this name
 * in the folder $FABRIC_MANAGER_DOUBLE. All processes that connect to one file see one Fabric
 * Manager: each function locks the file, changes it and unlocks it. __init__.py describes the file.
 *
 * The partitions are those of NVIDIA's Fabric Manager User Guide, "GPU Partitions". It does not say
 * which code Fabric Manager returns while it waits for the list of active partitions ("Resiliency"):
 * the double returns FM_ST_NOT_CONFIGURED, as while it starts, because the declaration of
 * fmSetActivatedFabricPartitions has no other code for this. It does not say either which links a
 * partition of one GPU reports; the double reports the number of NVLinks of the guide's tables.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "nvfm.h"

enum { SECONDS = 60, MAX_LINES = 256, MAX_LINE = 512, MAX_IDS = FM_MAX_FABRIC_PARTITIONS };

typedef struct { unsigned id, count, modules[FM_MAX_NUM_GPUS]; } Partition;
typedef struct { int count; char lines[MAX_LINES][MAX_LINE]; } State;

static int initialized, connected;
static char path[2 * FM_MAX_STR_LENGTH];
static State state;
static Partition table[MAX_IDS];
static unsigned table_size, links, numbers, timeout; /* the timeout is in milliseconds */

/* The state: lines of a key and a value. */

static char *find(const char *key, const char *value)
{
    size_t length = strlen(key), other = value ? strlen(value) : 0;
    for (int line = 0; line < state.count; line++) {
        char *text = state.lines[line];
        if (strncmp(text, key, length) || text[length] != ' ') continue;
        text += length + 1;
        if (!value || (!strncmp(text, value, other) && (!text[other] || text[other] == ' ')))
            return text;
    }
    return NULL;
}

static long get(const char *key) { char *text = find(key, NULL); return text ? atol(text) : 0; }
static int is(const char *key, const char *value) { return find(key, value) != NULL; }

static void drop(const char *key, const char *value)
{
    char *text;
    while ((text = find(key, value))) {
        int line = (int)((text - state.lines[0]) / MAX_LINE);
        memmove(state.lines[line], state.lines[line + 1], (size_t)(--state.count - line) * MAX_LINE);
    }
}

static void add(const char *key, const char *value)
{
    if (state.count < MAX_LINES - 1)
        snprintf(state.lines[state.count++], MAX_LINE, "%s %s", key, value);
}

static int load(void)
{
    int file = open(path, O_RDWR | O_CLOEXEC);
    FILE *stream = file < 0 ? NULL : fdopen(dup(file), "r");
    if (!stream) return -1;
    flock(file, LOCK_EX);
    state.count = 0;
    while (state.count < MAX_LINES - 1 && fgets(state.lines[state.count], MAX_LINE, stream)) {
        state.lines[state.count][strcspn(state.lines[state.count], "\n")] = 0;
        state.count++;
    }
    fclose(stream);
    return file;
}

static fmReturn_t save(int file, fmReturn_t code)
{
    if (ftruncate(file, 0) || lseek(file, 0, SEEK_SET)) abort();
    for (int line = 0; line < state.count; line++)
        dprintf(file, "%s\n", state.lines[line]);
    close(file);
    return code;
}

/* The partitions of a baseboard. */

static void partition(unsigned first, unsigned count, unsigned second, unsigned step)
{
    Partition *added = &table[table_size];
    added->id = numbers + table_size++;
    added->count = count;
    for (unsigned gpu = 0; gpu < count; gpu++)
        added->modules[gpu] = second && gpu >= count / 2 ? second + gpu - count / 2
                                                         : first + gpu * step;
}

static void make_table(void)
{
    int is_a100 = is("table", "a100"), is_h100 = is("table", "h100");
    unsigned gpus = is_a100 ? 16 : 8;
    table_size = 0, numbers = is("table", "b200") ? 1 : 0, links = is_a100 ? 12 : 18;
    if (is_a100) {
        partition(1, 16, 0, 1), partition(1, 8, 0, 1), partition(9, 8, 0, 1);
        partition(1, 8, 9, 1), partition(5, 8, 13, 1), partition(1, 8, 13, 1);
        partition(5, 8, 9, 1);
    } else {
        partition(1, 8, 0, 1);
    }
    for (unsigned first = 1; first <= gpus; first += 4) partition(first, 4, 0, 1);
    if (is_h100)
        partition(1, 2, 0, 2), partition(2, 2, 0, 2), partition(5, 2, 0, 2), partition(6, 2, 0, 2);
    else
        for (unsigned first = 1; first <= gpus; first += 2) partition(first, 2, 0, 1);
    for (unsigned first = 1; first <= gpus; first++) partition(first, 1, 0, 1);
}

static const char *text(unsigned number)
{
    static char buffer[16];
    snprintf(buffer, sizeof buffer, "%u", number);
    return buffer;
}

static Partition *known(unsigned id)
{
    for (unsigned index = 0; index < table_size; index++) {
        Partition *found = &table[index];
        if (found->id != id) continue;
        /* On A100 the partitions of a failed GPU are removed. */
        for (unsigned gpu = 0; gpu < found->count; gpu++)
            if (is("failed", text(found->modules[gpu]))) return NULL;
        return found;
    }
    return NULL;
}

static int overlaps(const Partition *one, const Partition *other)
{
    for (unsigned gpu = 0; gpu < one->count; gpu++)
        for (unsigned index = 0; index < other->count; index++)
            if (one->modules[gpu] == other->modules[index]) return 1;
    return 0;
}

/* Open the state for a function; a code other than FM_ST_SUCCESS if it returns at once. */
static fmReturn_t begin(const char *function, int *file)
{
    char *entry;
    fmReturn_t code = FM_ST_SUCCESS;
    if (!initialized) return FM_ST_UNINITIALIZED;
    if ((*file = load()) < 0) return FM_ST_CONNECTION_NOT_VALID;
    make_table();
    if ((entry = find("hang", function))) {
        unsigned milliseconds = 1000 * (unsigned)atoi(strchr(entry, ' '));
        close(*file);
        /* The timeout is that of the connection; a request has none. */
        if (!strcmp(function, "fmConnect") && milliseconds > timeout) {
            usleep(1000 * timeout);
            return FM_ST_CONNECTION_NOT_VALID;
        }
        usleep(1000 * milliseconds);
        if ((*file = load()) < 0) return FM_ST_CONNECTION_NOT_VALID;
    }
    if (is("crash", function)) abort();
    if (is("phase", "waiting") && get("now") - get("started") > SECONDS)
        drop("phase", NULL), add("phase", "stopped"); /* it ends without a list */
    if (is("phase", "stopped")) return save(*file, FM_ST_CONNECTION_NOT_VALID);
    if ((entry = find("fail", function))) {
        int times = 0;
        char line[MAX_LINE];
        sscanf(entry, "%*s %d %d", &code, &times);
        if (times > 0) {
            drop("fail", function);
            snprintf(line, sizeof line, "%s %d %d", function, code, times - 1);
            if (times > 1) add("fail", line);
        }
        return save(*file, code);
    }
    return FM_ST_SUCCESS;
}

/* The same for a request, which Fabric Manager serves in some phases only. */
static fmReturn_t request(const char *function, fmHandle_t handle, int *file)
{
    fmReturn_t code;
    if (initialized && (!connected || handle != path)) return FM_ST_BADPARAM;
    if ((code = begin(function, file))) return code;
    if (get("internal")) return save(*file, FM_ST_UNINITIALIZED);
    if (!get("mode")) return save(*file, FM_ST_NOT_SUPPORTED);
    if (is("phase", "starting")) return save(*file, FM_ST_NOT_CONFIGURED);
    if (is("phase", "waiting") && strcmp(function, "fmSetActivatedFabricPartitions"))
        return save(*file, FM_ST_NOT_CONFIGURED);
    return FM_ST_SUCCESS;
}

fmReturn_t fmLibInit(void)
{
    return initialized ? FM_ST_IN_USE : (initialized = 1, FM_ST_SUCCESS);
}

fmReturn_t fmLibShutdown(void)
{
    connected = 0;
    return initialized ? (initialized = 0, FM_ST_SUCCESS) : FM_ST_UNINITIALIZED;
}

fmReturn_t fmConnect(void *parameters, fmHandle_t *handle)
{
    int file;
    fmReturn_t code;
    fmConnectParams_v2 *given = parameters;
    const char *folder = getenv("FABRIC_MANAGER_DOUBLE");
    if (!given || !handle) return FM_ST_BADPARAM;
    /* An older library does not know the second layout. */
    int is_first = given->version == MAKE_FM_PARAM_VERSION(fmConnectParams_v1, 1);
    if (!is_first && given->version != MAKE_FM_PARAM_VERSION(fmConnectParams_v2, 2))
        return FM_ST_VERSION_MISMATCH;
    int is_unix = is_first ? given->addressIsUnixSocket == 1
                           : given->addressType == NV_FM_API_ADDR_TYPE_UNIX;
    if (!is_first && !is_unix && given->addressType != NV_FM_API_ADDR_TYPE_INET)
        return FM_ST_BADPARAM;
    if (is_unix)
        snprintf(path, sizeof path, "%s", given->addressInfo);
    else
        snprintf(path, sizeof path, "%s/%s%s", folder ? folder : "", given->addressInfo,
                 strchr(given->addressInfo, ':') ? "" : ":6666");
    timeout = given->timeoutMs;
    if ((code = begin("fmConnect", &file))) return code;
    if (!is_first && get("layout") == 1) return save(file, FM_ST_VERSION_MISMATCH);
    connected = 1;
    *handle = path;
    return save(file, FM_ST_SUCCESS);
}

fmReturn_t fmDisconnect(fmHandle_t handle)
{
    if (!initialized) return FM_ST_UNINITIALIZED;
    if (!connected || handle != path) return FM_ST_BADPARAM;
    return (connected = 0, FM_ST_SUCCESS);
}

fmReturn_t fmGetSupportedFabricPartitions(fmHandle_t handle, fmFabricPartitionList_t *list)
{
    int file;
    fmReturn_t code;
    if (!list) return FM_ST_BADPARAM;
    if (list->version != MAKE_FM_PARAM_VERSION(fmFabricPartitionList_t, 1))
        return FM_ST_VERSION_MISMATCH;
    if ((code = request("fmGetSupportedFabricPartitions", handle, &file))) return code;
    list->numPartitions = 0, list->maxNumPartitions = table_size;
    for (unsigned index = 0; index < table_size; index++) {
        Partition *found = known(table[index].id);
        if (!found) continue;
        fmFabricPartitionInfo_t *info = &list->partitionInfo[list->numPartitions++];
        info->partitionId = found->id, info->numGpus = found->count;
        info->isActive = is("active", text(found->id));
        for (unsigned gpu = 0; gpu < found->count; gpu++) {
            fmFabricPartitionGpuInfo_t *item = &info->gpuInfo[gpu];
            memset(item, 0, sizeof *item);
            item->physicalId = found->modules[gpu];
            /* Of H100 and later, Fabric Manager knows the module id only. */
            if (is("table", "a100"))
                snprintf(item->uuid, sizeof item->uuid, "GPU-%u", item->physicalId);
            item->maxNumNvLinks = found->count > 1 ? links : 0;
            item->numNvLinksAvailable = item->maxNumNvLinks;
            item->nvlinkLineRateMBps = 25000;
        }
    }
    return save(file, FM_ST_SUCCESS);
}

static fmReturn_t activate(int file, unsigned id, const char *functions)
{
    Partition *found = known(id);
    char line[MAX_LINE];
    if (!found) return save(file, FM_ST_BADPARAM);
    for (unsigned index = 0; index < table_size; index++) {
        if (!is("active", text(table[index].id)) || !overlaps(found, &table[index])) continue;
        snprintf(line, sizeof line, "%u %u", id, table[index].id);
        if (table[index].id != id && !is("refused", line)) add("refused", line);
        return save(file, FM_ST_IN_USE);
    }
    snprintf(line, sizeof line, "%u%s", id, functions);
    add("active", line);
    return save(file, FM_ST_SUCCESS);
}

fmReturn_t fmActivateFabricPartition(fmHandle_t handle, fmFabricPartitionId_t id)
{
    int file;
    fmReturn_t code = request("fmActivateFabricPartition", handle, &file);
    if (code) return code;
    return get("mode") == 1 ? activate(file, id, "") : save(file, FM_ST_NOT_SUPPORTED);
}

fmReturn_t fmActivateFabricPartitionWithVFs(
    fmHandle_t handle, fmFabricPartitionId_t id, fmPciDevice_t *functions, unsigned count)
{
    int file;
    char names[MAX_LINE] = "", gpu[MAX_LINE];
    fmReturn_t code = request("fmActivateFabricPartitionWithVFs", handle, &file);
    if (code) return code;
    if (get("mode") != 2) return save(file, FM_ST_NOT_SUPPORTED);
    Partition *found = known(id);
    if (!found || !functions || count != found->count) return save(file, FM_ST_BADPARAM);
    for (unsigned index = 0; index < count; index++) {
        fmPciDevice_t *function = &functions[index];
        size_t end = strlen(names);
        snprintf(names + end, sizeof names - end, " %04x:%02x:%02x.%x", function->domain,
                 function->bus, function->device, function->function);
        /* The function must be one of the GPU at this place. */
        snprintf(gpu, sizeof gpu, "%u %04x:%02x", found->modules[index], function->domain,
                 function->bus);
        if (find("gpu", text(found->modules[index])) && !is("gpu", gpu))
            return save(file, FM_ST_BADPARAM);
    }
    return activate(file, id, names);
}

fmReturn_t fmDeactivateFabricPartition(fmHandle_t handle, fmFabricPartitionId_t id)
{
    int file;
    fmReturn_t code = request("fmDeactivateFabricPartition", handle, &file);
    if (code) return code;
    if (!known(id)) return save(file, FM_ST_BADPARAM);
    if (!is("active", text(id))) return save(file, FM_ST_UNINITIALIZED);
    drop("active", text(id));
    return save(file, FM_ST_SUCCESS);
}

fmReturn_t fmSetActivatedFabricPartitions(fmHandle_t handle, fmActivatedFabricPartitionList_t *list)
{
    int file;
    fmReturn_t code;
    if (!list) return FM_ST_BADPARAM;
    if (list->version != MAKE_FM_PARAM_VERSION(fmActivatedFabricPartitionList_t, 1))
        return FM_ST_VERSION_MISMATCH;
    if ((code = request("fmSetActivatedFabricPartitions", handle, &file))) return code;
    if (!is("phase", "waiting")) return save(file, FM_ST_NOT_SUPPORTED);
    if (list->numPartitions > MAX_IDS) return save(file, FM_ST_BADPARAM);
    for (unsigned index = 0; index < list->numPartitions; index++) {
        Partition *found = known(list->partitionIds[index]);
        if (!found) return save(file, FM_ST_BADPARAM);
        for (unsigned other = 0; other < index; other++)
            if (overlaps(found, known(list->partitionIds[other]))) return save(file, FM_ST_BADPARAM);
    }
    for (unsigned index = 0; index < table_size; index++) {
        unsigned id = table[index].id, listed = 0;
        for (unsigned other = 0; other < list->numPartitions; other++)
            listed |= list->partitionIds[other] == id;
        if (listed && !is("active", text(id))) add("active", text(id));
        /* Its links are cut, under a running server if it has one. */
        if (!listed && is("active", text(id))) drop("active", text(id)), add("cut", text(id));
    }
    drop("phase", NULL), add("phase", "running");
    return save(file, FM_ST_SUCCESS);
}

/* For the test of the layouts. */
unsigned size_of(const char *name)
{
#define SIZE(type) if (!strcmp(name, #type)) return sizeof(type)
    SIZE(fmConnectParams_v1);
    SIZE(fmConnectParams_v2);
    SIZE(fmPciDevice_t);
    SIZE(fmFabricPartitionGpuInfo_t);
    SIZE(fmFabricPartitionInfo_t);
    SIZE(fmFabricPartitionList_t);
    SIZE(fmActivatedFabricPartitionList_t);
    return 0;
}
