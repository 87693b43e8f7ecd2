//! An endpoint: its machine, its slots and its memory.

use super::links::segments_of;
use super::*;

pub(crate) struct Node {
    pub(crate) machine: Machine,
    pub(crate) alive: bool,
    pub(crate) incarnation: Incarnation,
    pub(crate) socket: SocketAddr,
    pub(crate) slots: Arc<SlotTable>,
    pub(crate) region: Arc<Region>,
    pub(crate) layout: Arc<PoolLayout>,
    pub(super) links: BTreeMap<Incarnation, LinkSender>,
    pub(crate) link_transports: BTreeMap<Incarnation, String>,
    /// What one-sided links were told.
    pub(crate) told: Vec<Told>,
    pub(crate) ended: Vec<(HandleId, Result<Outcome>)>,
    pub(crate) notices: Vec<(HandleId, Notice)>,
    pub(crate) changes: Vec<(Incarnation, PeerChange)>,
}

impl Node {
    pub(super) fn new(
        index: usize,
        bits: u128,
        config: MachineConfig,
        layout: PoolLayout,
        now: Time,
        transports: &[&str],
    ) -> Node {
        let incarnation = Incarnation::from_bits(bits);
        let socket: SocketAddr = format!("127.0.0.{}:7000", index + 1).parse().unwrap();
        let slots = SlotTable::new(64);
        let layout = Arc::new(layout);
        let region = Region::allocate(layout.region_lengths()[0]).unwrap();
        let mut machine = Machine::new(MachineSetup {
            config,
            incarnation,
            address: EndpointAddress {
                sockets: vec![socket],
                incarnation: Some(incarnation),
                rank: Default::default(),
            },
            transports: transports
                .iter()
                .map(|name| TransportOffer {
                    name: (*name).to_string(),
                    advert: vec![1],
                    one_sided: *name == DIRECT,
                })
                .collect(),
            slots: slots.clone(),
            seed: bits ^ 0x5eed,
        });
        let regions: Arc<[Arc<Region>]> = vec![region.clone()].into();
        machine
            .add_pool(
                now,
                POOL,
                PoolSetup {
                    layout: layout.clone(),
                    regions,
                    serves: true,
                    receives: true,
                    keys: vec![(DIRECT.to_string(), vec![index as u8])],
                },
            )
            .unwrap();
        Node {
            machine,
            alive: true,
            incarnation,
            socket,
            slots,
            region,
            layout,
            links: BTreeMap::new(),
            link_transports: BTreeMap::new(),
            told: Vec::new(),
            ended: Vec::new(),
            notices: Vec::new(),
            changes: Vec::new(),
        }
    }

    pub(super) fn place(
        &mut self,
        from: Incarnation,
        header: &ChunkHeader,
        bytes: Option<Vec<u8>>,
        written: Option<Vec<Segment>>,
    ) -> (ChunkState, bool) {
        match self.slots.begin(from, header).unwrap() {
            Placement::Scrap(state) => (state, false),
            Placement::Message => {
                let applied = self.slots.message_applied(header, &bytes.unwrap());
                let state = applied.acknowledgement();
                (state, state == ChunkState::Arrived)
            }
            Placement::Place { stream, regions, gate } => {
                let valid = bytes.is_some();
                if let Some(written) = written {
                    assert_eq!(written, segments_of(&*stream, header), "written elsewhere than granted");
                }
                if let (Some(bytes), Some(_inside)) = (bytes, gate.enter()) {
                    let mut segments = Vec::new();
                    stream.segments(header.offset, u64::from(header.length), usize::MAX, &mut segments);
                    let mut at = 0;
                    for segment in segments {
                        let end = at + segment.length as usize;
                        regions[segment.region as usize]
                            .copy_in(segment.offset, &bytes[at..end])
                            .unwrap();
                        at = end;
                    }
                }
                let state = self.slots.placed(header, valid);
                (state, state == ChunkState::Arrived)
            }
        }
    }

    /// Writes `value` over a block in all planes.
    pub(crate) fn paint(&self, block: u32, value: u8) {
        for plane in 0..self.layout.planes().len() {
            let (_, offset) = self.layout.plane_offset(plane, block).unwrap();
            self.region.copy_in(offset, &[value; BLOCK as usize]).unwrap();
        }
    }

    /// The one value that a block has in all planes.
    pub(crate) fn colour(&self, block: u32) -> Option<u8> {
        let mut colour = None;
        for plane in 0..self.layout.planes().len() {
            let (_, offset) = self.layout.plane_offset(plane, block).unwrap();
            let mut bytes = [0; BLOCK as usize];
            self.region.copy_out(offset, &mut bytes).unwrap();
            for byte in bytes {
                if *colour.get_or_insert(byte) != byte {
                    return None;
                }
            }
        }
        colour
    }
}

/// A pool of these layers, with `blocks` blocks of [`TOKENS_PER_BLOCK`] tokens and [`BLOCK`] bytes.
pub(crate) fn layout(layers: std::ops::Range<u32>, blocks: u32) -> PoolLayout {
    let mut builder = PoolLayout::builder();
    let width = BLOCK as u32 / TOKENS_PER_BLOCK;
    let geometry = Geometry::latent(DType::U8, TOKENS_PER_BLOCK, width, Sharding::NONE);
    let group = builder.group("all", geometry, blocks);
    for layer in layers {
        builder.plane(PlaneSpec::new(group, layer.to_string(), PlaneKind::Latent));
    }
    builder.build().unwrap()
}

pub(crate) fn blocks(blocks: impl IntoIterator<Item = u32>) -> Selection {
    Selection::whole_blocks(TOKENS_PER_BLOCK, blocks.into_iter().collect())
}

pub(crate) fn target(selection: Selection) -> Target {
    Target::Selection {
        selection,
        scope: Scope::EVERYTHING,
    }
}
