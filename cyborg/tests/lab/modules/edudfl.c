// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
/*
 * QEMU's PCI device "ivshmem" as a DFL card with one port.
 *
 * The memory of the device contains a device feature list, which Linux's DFL drivers use as that of a
 * card of Intel. A thread plays the hardware: it acknowledges resets, and ends a reconfiguration.
 * Four copies of the last word of the image become the id of the function; FAILURE is a CRC error.
 */
#include <linux/delay.h>
#include <linux/io-64-nonatomic-lo-hi.h>
#include <linux/kthread.h>
#include <linux/module.h>
#include <linux/pci.h>

#include "dfl.h"

#define MEMORY_BAR 2
#define LIST_SIZE 0x10000
#define FIRST_FUNCTION 0x11111111
#define FAILURE 0xdeadbeef

/* Offsets of the registers; drivers/fpga/dfl.h has those of the headers. */
#define PR 0x1000
#define PR_CTRL (PR + 0x8)
#define PR_STS (PR + 0x10)
#define PR_DATA (PR + 0x18)
#define PR_ERR (PR + 0x20)
#define PR_INTFC_ID_L (PR + 0xa8)
#define PR_INTFC_ID_H (PR + 0xb0)
#define PORT LIST_SIZE
#define AFU_OFFSET 0x1000
#define AFU (PORT + AFU_OFFSET)

#define PR_RST BIT_ULL(0)
#define PR_RSTACK BIT_ULL(4)
#define PR_START BIT_ULL(12)
#define PR_COMPLETE BIT_ULL(13)
#define PR_CREDIT GENMASK_ULL(8, 0)
#define PR_BUSY BIT_ULL(16)
#define PR_CRC_ERROR BIT_ULL(1)

struct card {
	void __iomem *memory;
	struct task_struct *hardware;
	struct dfl_fpga_cdev *container;
};

static void write(struct card *card, u32 offset, u64 value)
{
	writeq(value, card->memory + offset);
}

static void set_function(struct card *card, u32 word)
{
	u64 half = (u64)word << 32 | word;

	write(card, AFU + GUID_L, half);
	write(card, AFU + GUID_H, half);
}

static void write_lists(struct card *card)
{
	u32 offset;

	for (offset = 0; offset < 2 * LIST_SIZE; offset += 8)
		write(card, offset, 0);
	write(card, DFH, FIELD_PREP(DFH_TYPE, DFH_TYPE_FIU) | FIELD_PREP(DFH_NEXT_HDR_OFST, PR) |
				 FIELD_PREP(DFH_ID, DFH_ID_FIU_FME));
	write(card, FME_HDR_CAP, FIELD_PREP(FME_CAP_NUM_PORTS, 1));
	write(card, FME_HDR_PORT_OFST(0), FME_PORT_OFST_IMP | PORT |
						  FIELD_PREP(FME_PORT_OFST_BAR_ID, MEMORY_BAR));
	write(card, FME_HDR_BITSTREAM_ID, 0x23000110010310ULL);
	write(card, FME_HDR_BITSTREAM_MD, 0x177402141ULL);
	write(card, PR, FIELD_PREP(DFH_TYPE, DFH_TYPE_PRIVATE) | DFH_EOL |
				FIELD_PREP(DFH_ID, FME_FEATURE_ID_PR_MGMT));
	write(card, PR_STS, PR_CREDIT);
	write(card, PR_INTFC_ID_H, 0x69528db6eb31577aULL);
	write(card, PR_INTFC_ID_L, 0x8c3668f9faa081f6ULL);
	write(card, PORT, FIELD_PREP(DFH_TYPE, DFH_TYPE_FIU) | DFH_EOL |
				  FIELD_PREP(DFH_ID, DFH_ID_FIU_PORT));
	write(card, PORT + NEXT_AFU, AFU_OFFSET);
	write(card, PORT + PORT_HDR_CAP, FIELD_PREP(PORT_CAP_MMIO_SIZE, 4));
	set_function(card, FIRST_FUNCTION);
}

static void acknowledge_port_reset(struct card *card)
{
	u64 value = readq(card->memory + PORT + PORT_HDR_CTRL);
	bool reset = value & PORT_CTRL_SFTRST, acknowledged = value & PORT_CTRL_SFTRST_ACK;

	if (reset != acknowledged)
		write(card, PORT + PORT_HDR_CTRL, value ^ PORT_CTRL_SFTRST_ACK);
}

/* The driver only waits while this changes the control register. */
static void reconfigure(struct card *card)
{
	u64 value = readq(card->memory + PR_CTRL);

	if (value & PR_RST && !(value & PR_RSTACK)) {
		write(card, PR_ERR, 0);
		write(card, PR_STS, PR_CREDIT);
		write(card, PR_CTRL, value | PR_RSTACK);
	} else if (value & PR_START && value & PR_COMPLETE) {
		u32 word = readq(card->memory + PR_DATA);

		if (word == FAILURE) {
			set_function(card, 0);
			write(card, PR_ERR, PR_CRC_ERROR);
			write(card, PR_STS, PR_CREDIT | PR_BUSY);
		} else {
			set_function(card, word);
		}
		write(card, PR_CTRL, value & ~(PR_START | PR_COMPLETE | PR_RSTACK));
	}
}

static int run_hardware(void *argument)
{
	while (!kthread_should_stop()) {
		acknowledge_port_reset(argument);
		reconfigure(argument);
		usleep_range(500, 1000);
	}
	return 0;
}

static int probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct card *card = devm_kzalloc(&pdev->dev, sizeof(*card), GFP_KERNEL);
	struct dfl_fpga_enum_info *info;
	resource_size_t start;
	int error = card ? pcim_enable_device(pdev) : -ENOMEM;

	if (error)
		return error;
	start = pci_resource_start(pdev, MEMORY_BAR);
	card->memory = devm_ioremap(&pdev->dev, start, 2 * LIST_SIZE);
	info = dfl_fpga_enum_info_alloc(&pdev->dev);
	if (!card->memory || !info)
		return -ENOMEM;
	write_lists(card);
	card->hardware = kthread_run(run_hardware, card, "edudfl");
	if (IS_ERR(card->hardware)) {
		error = PTR_ERR(card->hardware);
		goto free_info;
	}
	dfl_fpga_enum_info_add_dfl(info, start, LIST_SIZE);
	dfl_fpga_enum_info_add_dfl(info, start + PORT, LIST_SIZE);
	card->container = dfl_fpga_feature_devs_enumerate(info);
	if (IS_ERR(card->container)) {
		error = PTR_ERR(card->container);
		kthread_stop(card->hardware);
	}
	pci_set_drvdata(pdev, card);
free_info:
	dfl_fpga_enum_info_free(info);
	return error;
}

static void remove_card(struct pci_dev *pdev)
{
	struct card *card = pci_get_drvdata(pdev);

	dfl_fpga_feature_devs_remove(card->container);
	kthread_stop(card->hardware);
}

static const struct pci_device_id ids[] = { { PCI_DEVICE(0x1af4, 0x1110) }, {} };
MODULE_DEVICE_TABLE(pci, ids);

static struct pci_driver card_driver = {
	.name = "edudfl",
	.id_table = ids,
	.probe = probe,
	.remove = remove_card,
};
module_pci_driver(card_driver);

MODULE_DESCRIPTION("DFL card of the lab");
MODULE_LICENSE("GPL");
