// A js-libp2p peer that does what its arguments say and prints one JSON object a line:
// node --import ./poly.mjs peer.mjs ADDRESS KEY_TO_FIND KEY_TO_PROVIDE   (keys: 32 bytes, hex)
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { identify } from '@libp2p/identify'
import { kadDHT, passthroughMapper } from '@libp2p/kad-dht'
import { ping } from '@libp2p/ping'
import { tcp } from '@libp2p/tcp'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'
import { CID } from 'multiformats/cid'
import { create } from 'multiformats/hashes/digest'

const RAW = 0x55
const BLAKE3 = 0x1e
const LIMIT_MS = 15000

const [address, keyToFind, keyToProvide] = process.argv.slice(2)
const say = (what) => process.stdout.write(JSON.stringify(what) + '\n')
const cidOf = (hex) => CID.createV1(RAW, create(BLAKE3, Buffer.from(hex, 'hex')))

const node = await createLibp2p({
  addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  services: {
    identify: identify(),
    ping: ping(),
    dht: kadDHT({
      protocol: '/ipfs/kad/1.0.0',
      clientMode: false,
      // By default peers with private addresses, such as loopback, are left out.
      peerInfoMapper: passthroughMapper,
      allowQueryWithZeroPeers: true
    })
  }
})
say({ peer: node.peerId.toString(), addresses: node.getMultiaddrs().map(String) })

const target = multiaddr(address)
await node.dial(target, { signal: AbortSignal.timeout(LIMIT_MS) })
// js pings a peer itself before it takes it into its routing table, and only one ping at a time is allowed: wait for it.
const dht = node.services.dht
for (let waited = 0; dht.routingTable.size === 0 && waited < LIMIT_MS; waited += 50) {
  await new Promise((resolve) => setTimeout(resolve, 50))
}
say({ routing: dht.routingTable.size })

say({ ping_ms: await node.services.ping.ping(target, { signal: AbortSignal.timeout(LIMIT_MS) }) })

const providers = []
for await (const provider of node.contentRouting.findProviders(cidOf(keyToFind), { signal: AbortSignal.timeout(LIMIT_MS) })) {
  providers.push({ peer: provider.id.toString(), addresses: provider.multiaddrs.map(String) })
  break
}
say({ providers })

await node.contentRouting.provide(cidOf(keyToProvide), { signal: AbortSignal.timeout(LIMIT_MS) })
say({ provided: true })

// Be there until the test has looked.
process.stdin.resume()
process.stdin.on('end', async () => {
  await node.stop()
  process.exit(0)
})
