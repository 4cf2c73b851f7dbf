/* SPDX-License-Identifier: Apache-2.0 */
/* The part of Fabric Manager's SDK that the double has.
 *
 * Names and layouts are those of NVIDIA's Fabric Manager User Guide, "Fabric Manager SDK", and of
 * nv_fm_types.h. The double checks them, so they are written here once more and not shared with the
 * binding that is tested.
 */
#ifndef NVFM_H
#define NVFM_H

enum {
    FM_ST_SUCCESS = 0,
    FM_ST_BADPARAM = -1,
    FM_ST_NOT_SUPPORTED = -3,
    FM_ST_UNINITIALIZED = -4,
    FM_ST_VERSION_MISMATCH = -6,
    FM_ST_IN_USE = -7,
    FM_ST_NOT_CONFIGURED = -8,
    FM_ST_CONNECTION_NOT_VALID = -9
};
enum { FM_MAX_STR_LENGTH = 256, FM_MAX_NUM_GPUS = 16, FM_MAX_FABRIC_PARTITIONS = 64 };
enum { NV_FM_API_ADDR_TYPE_INET = 1, NV_FM_API_ADDR_TYPE_UNIX = 2 };

#define MAKE_FM_PARAM_VERSION(type, layout) ((unsigned)(sizeof(type) | ((layout) << 24)))

typedef int fmReturn_t;
typedef void *fmHandle_t;
typedef unsigned fmFabricPartitionId_t;

typedef struct {
    unsigned version;
    char addressInfo[FM_MAX_STR_LENGTH];
    unsigned timeoutMs;
    unsigned addressIsUnixSocket;
} fmConnectParams_v1;

typedef struct {
    unsigned version;
    char addressInfo[FM_MAX_STR_LENGTH];
    unsigned timeoutMs;
    unsigned addressIsUnixSocket;
    unsigned addressType;
} fmConnectParams_v2;

typedef struct {
    unsigned domain, bus, device, function;
} fmPciDevice_t;

typedef struct {
    unsigned physicalId;
    char uuid[80];
    char pciBusId[32];
    unsigned numNvLinksAvailable;
    unsigned maxNumNvLinks;
    unsigned nvlinkLineRateMBps;
} fmFabricPartitionGpuInfo_t;

typedef struct {
    fmFabricPartitionId_t partitionId;
    unsigned isActive;
    unsigned numGpus;
    fmFabricPartitionGpuInfo_t gpuInfo[FM_MAX_NUM_GPUS];
} fmFabricPartitionInfo_t;

typedef struct {
    unsigned version;
    unsigned numPartitions;
    unsigned maxNumPartitions;
    fmFabricPartitionInfo_t partitionInfo[FM_MAX_FABRIC_PARTITIONS];
} fmFabricPartitionList_t;

typedef struct {
    unsigned version;
    unsigned numPartitions;
    fmFabricPartitionId_t partitionIds[FM_MAX_FABRIC_PARTITIONS];
} fmActivatedFabricPartitionList_t;

fmReturn_t fmLibInit(void);
fmReturn_t fmLibShutdown(void);
fmReturn_t fmConnect(void *parameters, fmHandle_t *handle);
fmReturn_t fmDisconnect(fmHandle_t handle);
fmReturn_t fmGetSupportedFabricPartitions(fmHandle_t handle, fmFabricPartitionList_t *list);
fmReturn_t fmActivateFabricPartition(fmHandle_t handle, fmFabricPartitionId_t id);
fmReturn_t fmActivateFabricPartitionWithVFs(
    fmHandle_t handle, fmFabricPartitionId_t id, fmPciDevice_t *functions, unsigned count);
fmReturn_t fmDeactivateFabricPartition(fmHandle_t handle, fmFabricPartitionId_t id);
fmReturn_t fmSetActivatedFabricPartitions(
    fmHandle_t handle, fmActivatedFabricPartitionList_t *list);

#endif
