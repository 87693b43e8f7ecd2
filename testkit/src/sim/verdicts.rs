//! Promise 4 at the end of a run: both sides of each hand-over say the same, or one of them says that it cannot know.

use kvxfer_core::ErrorKind;
use kvxfer_core::error::Destination;
use kvxfer_core::machine::{MemberVerdict, Outcome};
use kvxfer_core::wire::Verdict;

use super::ledger::{ClaimRecord, What};
use super::world::World;

impl World {
    pub(crate) fn verdicts_agree(&mut self) {
        for serial in 1..self.ledger.len() {
            if let Some(words) = self.disagreement(serial) {
                self.fail("4 one verdict", words);
                return;
            }
        }
    }

    /// What the sources of an arrived destination say that it is not.
    fn disagreement(&self, serial: usize) -> Option<String> {
        let record = &self.ledger[serial];
        if !record.succeeded() && record.arrived.is_none() {
            return None;
        }
        record.came_from.iter().find_map(|source| {
            let other = &self.ledger[*source as usize];
            // The dead say nothing.
            let (_, said) = other.ended.as_ref()?;
            let agrees = match said {
                Ok(Outcome::Released { members }) => match &record.what {
                    What::Claim(claim) => member_agrees(members, claim),
                    _ => false,
                },
                Ok(_) => true,
                Err(error) => error.kind() == ErrorKind::Unknown || error.destination() == Destination::Quarantined,
            };
            (!agrees).then(|| {
                format!(
                    "{} has arrived, and {} says {}",
                    self.describe(serial as u32),
                    self.describe(*source),
                    super::oracle::words_of(said)
                )
            })
        })
    }
}

fn member_agrees(members: &[MemberVerdict], claim: &ClaimRecord) -> bool {
    members
        .iter()
        .find(|member| member.set == claim.set && member.member == claim.member)
        .is_some_and(|member| match &member.verdict {
            Verdict::Arrived | Verdict::Unknown => true,
            Verdict::Failed(error) => error.kind() == ErrorKind::Unknown,
        })
}
