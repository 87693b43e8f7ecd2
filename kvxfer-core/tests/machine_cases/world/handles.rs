//! What the tests do with handles, in one call, and what they ask.

use super::*;

impl World {
    pub(crate) fn ended(&self, node: usize, handle: HandleId) -> Option<&Result<Outcome>> {
        let mut ends = self.nodes[node].ended.iter().filter(|(ended, _)| *ended == handle);
        let end = ends.next().map(|(_, result)| result);
        assert!(ends.next().is_none(), "handle {handle:?} of node {node} ended twice");
        end
    }

    pub(crate) fn error(&self, node: usize, handle: HandleId) -> ErrorKind {
        match self.ended(node, handle) {
            Some(Err(error)) => error.kind(),
            other => panic!("handle {handle:?} of node {node}: {other:?}"),
        }
    }

    pub(crate) fn ok(&self, node: usize, handle: HandleId) -> Outcome {
        match self.ended(node, handle) {
            Some(Ok(outcome)) => outcome.clone(),
            other => panic!("handle {handle:?} of node {node}: {other:?}"),
        }
    }

    pub(crate) fn offer(&mut self, node: usize, key: &str) -> HandleId {
        let now = self.now;
        self.nodes[node]
            .machine
            .offer(now, key.as_bytes(), POOL, offer_options())
            .unwrap()
    }

    /// An offer of these blocks, released as a whole.
    pub(crate) fn full_offer(&mut self, node: usize, key: &str, selection: Selection) -> HandleId {
        let offer = self.offer(node, key);
        self.fill_offer(node, offer, selection);
        offer
    }

    pub(crate) fn fill_offer(&mut self, node: usize, offer: HandleId, selection: Selection) {
        let now = self.now;
        let end = selection.groups[0].token_end;
        self.nodes[node].machine.append(now, offer, &selection).unwrap();
        self.nodes[node].machine.finish(now, offer, end).unwrap();
    }

    pub(crate) fn claim(&mut self, node: usize, key: &str, sources: &[usize]) -> HandleId {
        self.claim_with(node, key, sources, claim_options(node as u128 + 1))
    }

    pub(crate) fn claim_with(&mut self, node: usize, key: &str, sources: &[usize], options: ClaimOptions) -> HandleId {
        let now = self.now;
        let addresses: Vec<EndpointAddress> = sources.iter().map(|source| self.address(*source)).collect();
        self.nodes[node]
            .machine
            .claim(now, key.as_bytes(), POOL, &addresses, options)
            .unwrap()
    }

    pub(crate) fn fill(&mut self, node: usize, claim: HandleId, selection: Selection) {
        let now = self.now;
        self.nodes[node].machine.claim_into(now, claim, selection).unwrap();
    }

    pub(crate) fn cancel(&mut self, node: usize, handle: HandleId) {
        let now = self.now;
        self.nodes[node].machine.cancel(now, handle);
    }

    pub(crate) fn gauge(&self, node: usize, name: &str) -> u64 {
        let gauges = self.nodes[node].machine.gauges();
        gauges.iter().find(|(gauge, _)| *gauge == name).unwrap().1
    }

    /// After everything has ended: nothing is left but sessions and links, not even retained verdicts.
    pub(crate) fn assert_clean(&mut self) {
        self.run_ms(2_000);
        for node in (0..self.nodes.len()).filter(|node| self.nodes[*node].alive) {
            for gauge in [
                "offers",
                "claims",
                "grants",
                "transfers",
                "link_transfers",
                "members",
                "waiting_claims",
                "slots_in_use",
                "slots_retained",
                "slots_quarantined",
                "messages_unacknowledged",
            ] {
                assert_eq!(self.gauge(node, gauge), 0, "{gauge} of node {node}");
            }
        }
    }
}

pub(crate) fn offer_options() -> OfferOptions {
    OfferOptions {
        readers: 1,
        deadline: None,
        priority: 0,
        checksum: false,
    }
}

pub(crate) fn claim_options(set: u128) -> ClaimOptions {
    ClaimOptions {
        set,
        member: 0,
        members: 1,
        deadline: None,
        pull: false,
    }
}
