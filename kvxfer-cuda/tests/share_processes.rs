//! Memory that endpoints on one host map of each other: two processes, and who is not to be let in.

#![allow(clippy::unwrap_used)]

mod common;

use std::os::fd::OwnedFd;
use std::time::Duration;

use common::share::{Child, bytes_of, checksum, export, gone, run, take_all};
use common::{Bench, pattern, region, segment, until, wait};
use kvxfer_core::ErrorKind;
use kvxfer_core::memory::{CopyState, ImportState};
use kvxfer_cuda::Gather;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, send, socket_with,
};

const LENGTH: u64 = 1 << 20;
const BLOCK: usize = 2 << 20;
/// Long enough for what must not happen.
const MOMENT: Duration = Duration::from_millis(100);

#[test]
#[ignore = "started by the tests below"]
fn child_main() {
    common::share::child_main();
}

#[test]
fn another_process_opens_an_allocation_once_and_copies_from_it() {
    let bench = Bench::with(&[("*", "alloc_offset", "512")], Gather::Auto);
    // Two regions of one allocation.
    let address = bench.engine.allocate(2 * LENGTH as usize).unwrap();
    let regions = [0, LENGTH].map(|offset| region(&bench.cuda, address + offset, LENGTH).unwrap());
    let model = pattern(2 * LENGTH as usize, 3);
    bench.fake.write(address, &model).unwrap();
    let exported = regions.each_ref().map(|region| export(region).unwrap());
    for device in ["0", "1"] {
        let mut child = Child::importer(&bench.fake, device);
        for (exported, part) in exported.iter().zip(model.chunks(LENGTH as usize)) {
            assert_eq!(child.imports(exported, LENGTH), format!("copied {}", checksum(part)));
            assert_eq!(exported.importers(), 1);
        }
        assert_eq!(child.ask("count cuIpcOpenMemHandle_v2"), "1");
        child.ask("drop");
        until("it has let go", || {
            exported.iter().all(|exported| exported.importers() == 0)
        });
        assert_eq!(child.ask("count cuIpcCloseMemHandle"), "1");
        assert_eq!(child.ask("end"), "[]");
    }
    // Freeing it now breaks no rule.
    drop((exported, regions));
    bench.engine.free(address).unwrap();
    bench.end();
}

#[test]
fn another_process_maps_mappings_however_many() {
    let bench = Bench::new();
    let lengths: Vec<usize> = (0..70).map(|index| BLOCK * (1 + index % 2)).collect();
    let start = bench.engine.map(&lengths, true).unwrap();
    let whole: usize = lengths.iter().sum();
    let (offset, length) = (BLOCK as u64 / 4, (whole - BLOCK / 2) as u64);
    let made = region(&bench.cuda, start + offset, length).unwrap();
    let model = pattern(length as usize, 4);
    bench.fake.write(made.address(), &model).unwrap();
    let exported = export(&made).unwrap();
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    for device in ["0", "1"] {
        let mut child = Child::importer(&bench.fake, device);
        assert_eq!(child.imports(&exported, length), format!("copied {}", checksum(&model)));
        assert_eq!(child.ask("count cuMemMap"), "70");
        assert_eq!(child.ask("end"), "[]");
        until("it has let go", || exported.importers() == 0);
    }
    until("descriptors are closed", || open() <= before);
    drop((exported, made));
    bench.engine.unmap(start, &lengths).unwrap();
    bench.end();
}

#[test]
fn without_peer_access_another_process_says_so() {
    let bench = Bench::with(&[("gpu1", "peer", "off")], Gather::Auto);
    let made = bench.region(LENGTH);
    let exported = export(&made).unwrap();
    let mut child = Child::importer(&bench.fake, "1");
    let said = child.imports(&exported, LENGTH);
    assert!(said.starts_with("refused") && said.contains("does not reach"), "{said}");
    until("it is let go of", || exported.importers() == 0);
    assert_eq!(child.ask("end"), "[]");
    drop((exported, made));
    bench.end();
}

#[test]
fn what_an_importer_cannot_unmap_counts_until_its_end() {
    let bench = Bench::with(&[("*", "fail", "cuIpcCloseMemHandle:UNKNOWN:1")], Gather::Auto);
    let made = bench.region(LENGTH);
    let exported = export(&made).unwrap();
    let mut child = Child::importer(&bench.fake, "0");
    child.imports(&exported, LENGTH);
    child.ask("drop");
    until("it was tried", || child.ask("count cuIpcCloseMemHandle") == "1");
    exported.recall();
    std::thread::sleep(MOMENT);
    assert_eq!(
        exported.importers(),
        1,
        "the owner was told that it may free the memory"
    );
    child.0.kill();
    until("its end is noticed", || exported.importers() == 0);
    drop((exported, made));
    bench.end();
}

/// An importer that gives its connection up, because it got less than was sent, has what it copies from mapped all the same.
#[test]
fn an_importer_that_breaks_off_while_it_copies_still_counts() {
    let bench = Bench::with(&[("gpu0", "op_delay_us", "60000000")], Gather::Auto);
    let made = bench.region(LENGTH);
    let exported = export(&made).unwrap();
    let start = bench.engine.map(&[BLOCK], true).unwrap();
    let other = region(&bench.cuda, start, BLOCK as u64).unwrap();
    let descriptor = export(&other).unwrap();
    let mut child = Child::importer(&bench.fake, "0");
    child.begins(&exported, LENGTH);
    assert_eq!(child.ask("no more descriptors"), "none");
    let said = child.maps(&descriptor);
    assert!(said.starts_with("Gone") && said.contains("PeerLost"), "{said}");
    exported.recall();
    // Longer than an importer counts that has only closed its connection.
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(exported.importers(), 1, "memory that is being read would be freed");
    child.0.kill();
    until("its end is noticed", || exported.importers() == 0);
    drop((exported, descriptor, made, other));
    bench.engine.unmap(start, &[BLOCK]).unwrap();
    bench.end();
}

#[test]
fn an_importer_that_is_killed_has_let_go() {
    let bench = Bench::new();
    let made = bench.region(LENGTH);
    let exported = export(&made).unwrap();
    let mut child = Child::importer(&bench.fake, "0");
    child.imports(&exported, LENGTH);
    assert_eq!(exported.importers(), 1);
    child.0.kill();
    until("its end is noticed", || exported.importers() == 0);
    let address = made.address();
    drop((exported, made));
    bench.engine.free(address).unwrap();
    bench.end();
}

#[test]
fn a_fork_that_holds_the_connection_holds_nothing_else() {
    let bench = Bench::new();
    let (made, to) = (bench.region(LENGTH), bench.region(LENGTH));
    let exported = export(&made).unwrap();
    let mut child = Child::importer(&bench.fake, "0");
    child.imports(&exported, LENGTH);
    let fork = child.kill_all_but_a_fork();
    until("the importer's end is noticed", || exported.importers() == 0);
    drop(fork);
    // The same at the other end.
    let mut owner = Child::owner();
    let import = take_all(&to, &owner.exports(&bench.fake, 0, LENGTH)).unwrap();
    let fork = owner.kill_all_but_a_fork();
    assert_eq!(gone(&import).kind(), ErrorKind::PeerLost);
    drop((fork, exported, import, made, to));
    bench.end();
}

#[test]
fn an_importer_that_is_stopped_has_not() {
    let bench = Bench::new();
    let made = bench.region(LENGTH);
    let exported = export(&made).unwrap();
    let mut child = Child::importer(&bench.fake, "0");
    child.imports(&exported, LENGTH);
    child.0.stop().unwrap();
    exported.recall();
    std::thread::sleep(MOMENT);
    assert_eq!(exported.importers(), 1);
    // The others are served meanwhile.
    let second = bench.region(LENGTH);
    let other = export(&second).unwrap();
    let mut quick = Child::importer(&bench.fake, "0");
    assert!(quick.imports(&other, LENGTH).starts_with("copied"));
    child.0.resume().unwrap();
    until("it lets go when it runs again", || exported.importers() == 0);
    assert_eq!(child.ask("end"), "[]");
    assert_eq!(quick.ask("end"), "[]");
    drop((exported, other, made, second));
    bench.end();
}

#[test]
fn an_importer_that_stays_stopped_keeps_the_memory_beyond_the_owners_end() {
    let bench = Bench::new();
    let made = bench.region(LENGTH);
    let exported = export(&made).unwrap();
    let mut child = Child::importer(&bench.fake, "0");
    child.imports(&exported, LENGTH);
    child.0.stop().unwrap();
    let Bench { cuda, engine, fake } = bench;
    drop((exported, cuda));
    assert_eq!(std::sync::Arc::strong_count(&made), 2, "it is kept for the importer");
    child.0.kill();
    until("the memory is given back", || std::sync::Arc::strong_count(&made) == 1);
    drop(made);
    until("nothing is left", || fake.leaks().is_empty());
    drop(engine);
    fake.assert_clean();
}

#[test]
fn an_owner_that_is_killed_ends_the_import_and_not_the_copies() {
    let bench = Bench::new();
    let to = bench.region(LENGTH);
    let mut owner = Child::owner();
    let description = owner.exports(&bench.fake, 0, LENGTH);
    let import = take_all(&to, &description).unwrap();
    let model = pattern(LENGTH as usize, 9);
    assert!(bytes_of(&bench.fake, &to) == model);
    bench.fake.write(to.address(), &vec![0; LENGTH as usize]).unwrap();
    bench.fake.set_now("*", "stall", "own").unwrap();
    let (domain, all) = (to.domain(), [segment(0, 0, LENGTH)]);
    let ticket = domain
        .start_import_copy(&[run(&import, 0, LENGTH)], std::slice::from_ref(&to), &all)
        .unwrap();
    assert_eq!(domain.poll_copy(ticket).unwrap(), CopyState::Running);
    owner.0.kill();
    assert_eq!(gone(&import).kind(), ErrorKind::PeerLost);
    assert_eq!(domain.poll_copy(ticket).unwrap(), CopyState::Running);
    bench.fake.set_now("*", "stall", "off").unwrap();
    wait(&**domain, ticket).unwrap();
    assert!(bytes_of(&bench.fake, &to) == model, "the device still had it");
    until("it is closed", || bench.fake.count("cuIpcCloseMemHandle") == 1);
    // It is not there any more for anybody.
    let again = domain.import(&description).unwrap();
    let error = gone(&again);
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("not found"), "{error}");
    drop((import, again, to));
    bench.end();
}

#[test]
fn an_owner_that_does_not_answer_is_not_waited_for() {
    let bench = Bench::new();
    let (made, to) = (bench.region(LENGTH), bench.region(LENGTH));
    let mut owner = Child::owner();
    let description = owner.exports(&bench.fake, 0, LENGTH);
    owner.0.stop().unwrap();
    let stuck = to.domain().import(&description).unwrap();
    // Others are imported meanwhile.
    let exported = export(&made).unwrap();
    let import = take_all(&to, exported.description()).unwrap();
    assert!(matches!(stuck.state(), ImportState::Pending));
    assert_eq!(gone(&stuck).kind(), ErrorKind::DeadlineExceeded);
    drop((stuck, import, exported, made, to));
    bench.end();
}

/// A connection to whoever gave the description, past everything that importers do right.
struct Intruder(OwnedFd);

impl Intruder {
    fn new(description: &[u8]) -> Intruder {
        // Bytes 1 to 16 are the name.
        let name = description[1..17]
            .iter()
            .fold("kvxfer-".to_owned(), |text, byte| text + &format!("{byte:02x}"));
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
        set_socket_timeout(&socket, Timeout::Recv, Some(common::PATIENCE)).unwrap();
        Intruder(socket)
    }

    /// False: nobody takes it.
    fn say(&self, message: &[u8]) -> bool {
        send(&self.0, message, SendFlags::NOSIGNAL).is_ok()
    }

    /// The next message; none if it was closed.
    fn hear(&self) -> Option<Vec<u8>> {
        let mut bytes = vec![0u8; 4096];
        match recv(&self.0, &mut bytes[..], RecvFlags::empty()) {
            Ok((0, _)) | Err(rustix::io::Errno::CONNRESET) => None,
            Ok((length, _)) => Some(bytes[..length].to_vec()),
            Err(errno) => panic!("{errno}"),
        }
    }

    /// The message of an importer that wants what is described, under a name of its own.
    fn wish(description: &[u8], id: u8) -> Vec<u8> {
        [&[0, id], &description[17..33], &[0, 0]].concat()
    }
}

#[test]
fn who_knows_no_secret_is_given_nothing() {
    let bench = Bench::new();
    let (made, to) = (bench.region(LENGTH), bench.region(LENGTH));
    let exported = export(&made).unwrap();
    let mut wrong = exported.description().to_vec();
    wrong[20] ^= 1;
    let error = take_all(&to, &wrong).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotRegistered, "{error}");
    let mut nowhere = exported.description().to_vec();
    nowhere[5] ^= 1;
    assert_eq!(take_all(&to, &nowhere).unwrap_err().kind(), ErrorKind::Unsupported);
    for garbage in [&b""[..], b"\x02", &[255; 300], &exported.description()[..20]] {
        let error = take_all(&to, garbage).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    }
    assert_eq!(exported.importers(), 0);
    drop((exported, made, to));
    bench.end();
}

#[test]
fn garbage_closes_its_connection_and_no_other() {
    let bench = Bench::new();
    let (made, to) = (bench.region(LENGTH), bench.region(LENGTH));
    let exported = export(&made).unwrap();
    let import = take_all(&to, exported.description()).unwrap();
    let wish = |id| Intruder::wish(exported.description(), id);
    let second = export(&to).unwrap();
    for garbage in [
        &b"x"[..],
        &[],
        &[0; 40],
        &[255; 900],
        &pattern(3000, 5),
        &Intruder::wish(second.description(), 7),
    ] {
        // It has something: it is not sent away for its silence.
        let intruder = Intruder::new(exported.description());
        assert!(intruder.say(&wish(7)) && intruder.hear().is_some());
        assert_eq!(exported.importers(), 2);
        assert!(intruder.say(garbage));
        assert_eq!(intruder.hear(), None);
        until("it has nothing any more", || exported.importers() == 1);
    }
    // Who says nothing is sent away too, in the end.
    assert_eq!(Intruder::new(exported.description()).hear(), None);
    drop(second);
    assert!(matches!(import.state(), ImportState::Ready));
    assert_eq!(exported.importers(), 1);
    drop((import, exported, made, to));
    bench.end();
}

#[test]
fn connections_are_bounded() {
    let bench = Bench::new();
    let (made, to) = (bench.region(LENGTH), bench.region(LENGTH));
    let exported = export(&made).unwrap();
    let many: Vec<_> = (0..256).map(|_| Intruder::new(exported.description())).collect();
    let error = take_all(&to, exported.description()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
    drop(many);
    let mut import = take_all(&to, exported.description());
    until("there is room again", || {
        if import.is_err() {
            import = take_all(&to, exported.description());
        }
        import.is_ok()
    });
    drop((import, exported, made, to));
    bench.end();
}

#[test]
fn another_user_is_not_let_in() {
    if !rustix::process::geteuid().is_root() {
        // Nobody else can be played.
        return;
    }
    let bench = Bench::new();
    let (made, to) = (bench.region(LENGTH), bench.region(LENGTH));
    let exported = export(&made).unwrap();
    let description = exported.description().to_vec();
    let other = std::thread::spawn(move || {
        // Of this thread only, as the system has it (libc's function would change all).
        // SAFETY: takes three numbers.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65_534, 65_534, 65_534) }, 0);
        let intruder = Intruder::new(&description);
        intruder.say(&Intruder::wish(&description, 1));
        assert_eq!(intruder.hear(), None);
    });
    other.join().unwrap();
    let import = take_all(&to, exported.description()).unwrap();
    drop((import, exported, made, to));
    bench.end();
}
